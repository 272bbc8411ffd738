from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat, Message
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.documents import Document, OverLength, documents, documents_hash
from eagle3_lab.data.repetition import is_looping


def conversation(*contents: str, name: str = "x", cut: bool = False, looping: bool = False) -> Conversation:
    messages: list[Message] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    return Conversation(name, tuple(messages), cut=cut, looping=looping)


def encode(
    tokenizer: PreTrainedTokenizerFast, *some: Conversation, max_length: int = 500, over_length: OverLength = "cut"
) -> tuple[list[Document], Report]:
    report = Report("train")
    return list(documents(some, Chat(tokenizer), report, max_length=max_length, over_length=over_length)), report


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (list(range(32)), False),
        ([*range(8)] * 3, False),
        ([*range(8)] * 4, True),
        ([0] * 10, False),
        ([0] * 11, True),
        (([*range(8), 99] * 2) + ([*range(8), 98] * 2), True),
        ([1, 2, 3], False),
    ],
)
def test_an_answer_loops_when_eight_tokens_in_a_row_stand_in_it_more_than_three_times(
    ids: list[int], expected: bool
) -> None:
    assert is_looping(ids) is expected


def test_looping_answers_are_counted_and_left_out_whether_marked_or_found(chatml: PreTrainedTokenizerFast) -> None:
    again = "round and round it goes. " * 6
    found, report = encode(
        chatml,
        conversation("q", "a"),
        conversation("q", again),
        conversation("q", "a", looping=True),
        conversation(again, "a"),
    )
    assert [one.conversation.messages[0]["content"] for one in found] == ["q", again]
    assert report.dropped == {"looping answer": 2}


def test_a_long_question_leaves_no_answer_and_is_dropped_with_a_count(chatml: PreTrainedTokenizerFast) -> None:
    long = conversation("word " * 3000, "ok", name="long")
    found, report = encode(chatml, conversation("q", "a"), long, max_length=128)
    assert [one.conversation.id for one in found] == ["x"]
    assert str(report) == "train: 1 of 2 conversations; dropped 1 (no answer within max_length)"


def test_a_long_answer_is_cut_at_max_length_and_its_kept_part_stays_supervised(chatml: PreTrainedTokenizerFast) -> None:
    whole, _ = encode(chatml, conversation("q", "abcdefghij" * 3))
    for length in range(len(whole[0]) - 20, len(whole[0])):
        (cut,), report = encode(chatml, conversation("q", "abcdefghij" * 3), max_length=length)
        assert cut.ids.tolist() == whole[0].ids[:length].tolist()
        assert cut.supervised.tolist() == whole[0].supervised[:length].tolist()
        assert report.shortened == {"longer than max_length": 1}


def test_no_header_is_supervised_wherever_the_cut_falls(chatml: PreTrainedTokenizerFast) -> None:
    talk = conversation("q", "first", "r", "second")
    (whole,), _ = encode(chatml, talk)
    for length in range(1, len(whole)):
        found, report = encode(chatml, talk, max_length=length)
        text = "".join(str(chatml.decode(one.ids[one.supervised].tolist())) for one in found)
        assert "first<|im_end|>second<|im_end|>".startswith(text)
        assert report.kept + report.dropped.total() == 1


def test_over_long_conversations_are_dropped_as_a_whole_when_asked(chatml: PreTrainedTokenizerFast) -> None:
    long, short = conversation("q", " ".join(map(str, range(60)))), conversation("q", "a")
    found, report = encode(chatml, long, short, max_length=90, over_length="drop")
    assert len(found) == 1
    assert report.dropped == {"longer than max_length": 1}
    assert not report.shortened


def test_an_answer_that_holds_the_end_of_turn_marker_is_dropped(chatml: PreTrainedTokenizerFast) -> None:
    found, report = encode(chatml, conversation("q", "a<|im_end|>b"), conversation("a<|im_end|>b", "a"))
    assert len(found) == 1
    assert report.dropped == {"end-of-turn marker inside an answer": 1}


def test_a_cut_conversation_ends_supervised_and_without_end_of_turn(chatml: PreTrainedTokenizerFast) -> None:
    (one,), _ = encode(chatml, conversation("q", "a", "r", "bc", cut=True))
    assert chatml.decode(one.ids[one.supervised].tolist()) == "a<|im_end|>bc"
    assert bool(one.supervised[-1])


def test_conversations_that_the_template_refuses_are_dropped_counted_and_named(
    tokenizer_with: Callable[[str | None], PreTrainedTokenizerFast], chatml: PreTrainedTokenizerFast
) -> None:
    strict = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    tokenizer = tokenizer_with(strict + str(chatml.chat_template))
    several = [conversation("q", "a", "r", "b", name=f"n{i}") for i in range(7)]
    found, report = encode(tokenizer, *several, conversation("q", "a"))
    assert [one.conversation.id for one in found] == ["x"]
    reason = "the chat template refuses it (TemplateError: one turn only)"
    assert report.dropped == {reason: 7} and report.named == {reason: ["n0", "n1", "n2", "n3", "n4"]}
    assert str(report).endswith("; dropped 7 (" + reason + ": n0, n1, n2, n3, n4, ...)")
    assert Report.of(report.counts()) == report


def test_answers_that_the_template_changes_are_counted_under_one_reason_whatever_their_turn(
    tokenizer_with: Callable[[str | None], PreTrainedTokenizerFast], chatml: PreTrainedTokenizerFast
) -> None:
    shouts = str(chatml.chat_template).replace("m['content']", "m['content'] | replace('c', 'C')")
    some = conversation("q", "c", name="first"), conversation("q", "a", "r", "c", name="second")
    found, report = encode(tokenizer_with(shouts), *some, conversation("q", "a"))
    assert len(found) == 1
    assert report.named == {"the chat template changes an answer's text": ["first", "second"]}


def test_the_hash_of_documents_changes_with_ids_mask_and_order(chatml: PreTrainedTokenizerFast) -> None:
    one, _ = encode(chatml, conversation("q", "a"), conversation("q", "b"))
    assert documents_hash(one) == documents_hash(encode(chatml, conversation("q", "a"), conversation("q", "b"))[0])
    assert documents_hash(one) != documents_hash(one[::-1])
    other = Document(one[0].conversation, one[0].ids, ~one[0].supervised)
    assert documents_hash(one) != documents_hash([other, one[1]])
