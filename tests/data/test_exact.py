"""Whether training on an answer's text teaches the tokens that were written, with two kinds of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import read_conversations
from eagle3_lab.data.generation.dialogue import Dialogue, Said, Written, read_back
from eagle3_lab.data.parts import divide

Build = Callable[[str | None], PreTrainedTokenizerFast]
QUESTION = {"role": "user", "content": "q"}

# As Zephyr's and TinyLlama's: headers are plain text, and the prompt ends in a line break.
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Vicuna's: a space between the prompt and the answer, which the target writes.
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def sentencepiece(template: str) -> PreTrainedTokenizerFast:
    """As Llama 2's: a space before what is read, spaces as ``▁``, bytes for what is not in the vocabulary."""
    words = ["alpha", "beta", "gamma"]
    letters = sorted(set("".join(words)) | set("<|>:userasitnUSERASITNTq▁"))
    pieces, merges = dict.fromkeys(letters), []
    for start in ("▁", ""):  # the longer pieces first
        for word in words:
            whole = start + word
            for i in range(1, len(whole)):
                if whole[: i + 1] not in pieces:
                    merges.append((whole[:i], whole[i]))
                    pieces[whole[: i + 1]] = None
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    inner = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    found = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found


def back(tokenizer: PreTrainedTokenizerFast, *tokens: str | int, cut: bool = False) -> Said:
    """An answer of these tokens, read back behind one question."""
    vocab, chat = tokenizer.get_vocab(), Chat(tokenizer)
    ids = [vocab[one] if isinstance(one, str) else one for one in tokens]
    dialogue = Dialogue("d", "", 0, (QUESTION,), messages=[QUESTION])
    return read_back(dialogue, chat.prompt_ids([QUESTION]), Written(tuple(ids), cut), chat)


def test_an_answer_whose_first_token_reads_otherwise_alone_is_exact() -> None:
    tokenizer = sentencepiece(ZEPHYR)
    assert tokenizer.tokenize("beta") == ["▁beta"]
    assert back(tokenizer, "beta", "</s>") == Said("beta", 2, False, True, False)
    assert back(tokenizer, "beta", "▁gamma", "</s>") == Said("beta gamma", 3, False, True, False)
    assert back(tokenizer, "▁beta", "</s>") == Said(" beta", 2, False, True, False), "the space is not lost"


def test_a_token_sequence_that_its_own_text_does_not_give_is_not_exact() -> None:
    tokenizer = sentencepiece(ZEPHYR)
    assert back(tokenizer, "be", "ta" if "ta" in tokenizer.get_vocab() else "t", "a", "</s>").exact is False
    assert back(tokenizer, "b", "e", "t", "a", "</s>") == Said("beta", 5, False, False, False)
    assert back(tokenizer, "beta", "<s>").exact is False, "it ends with another end token than the template's"


def test_a_space_between_prompt_and_answer_is_the_targets() -> None:
    assert back(sentencepiece(VICUNA), "▁beta", "</s>") == Said("beta", 2, False, True, False)
    assert not back(sentencepiece(VICUNA), "beta", "</s>").exact, "the template writes a space that was not written"


def test_a_template_that_trims_teaches_other_tokens_than_were_written(llama3: PreTrainedTokenizerFast) -> None:
    assert back(llama3, "a", "b", "<|eot_id|>") == Said("ab", 3, False, True, False)
    for space in ("Ċ", "ĊĊ", "Ġ"):
        for tokens in (("a", "b", space, "<|eot_id|>"), (space, "a", "b", "<|eot_id|>")):
            assert not back(llama3, *tokens).exact, tokens
    assert not back(llama3, "a", "Ċ", cut=True).exact
    assert back(llama3, "a", "Ċ", "b", "<|eot_id|>").exact, "within the text nothing is trimmed"


def test_where_nothing_is_trimmed_the_same_answers_are_exact(chatml: PreTrainedTokenizerFast) -> None:
    for tokens in (
        ("a", "b", "Ċ", "<|im_end|>"),
        ("a", "ĊĊ", "<|im_end|>"),
        ("Ċ", "a", "<|im_end|>"),
        ("Ġ", "a", "<|im_end|>"),
    ):
        assert back(chatml, *tokens).exact, tokens
    assert not back(chatml, "a", "Ċ", "Ċ", "<|im_end|>").exact, "two line breaks read back as one token"
    assert not back(chatml, "h", "e", "<|im_end|>").exact
    assert back(chatml, "a", "Ċ", cut=True).exact


def test_text_alone_is_exact_unless_the_template_changes_it(
    llama3: PreTrainedTokenizerFast, chatml: PreTrainedTokenizerFast
) -> None:
    def read(tokenizer: PreTrainedTokenizerFast, text: str, cut: bool = False) -> Said:
        chat, dialogue = Chat(tokenizer), Dialogue("d", "", 0, (QUESTION,), messages=[QUESTION])
        return read_back(dialogue, chat.prompt_ids([QUESTION]), Written(None, cut, text), chat)

    assert read(chatml, "abc\n") == Said("abc\n", 5, False, True, False)
    assert read(llama3, "abc") == Said("abc", 4, False, True, False)
    assert not read(llama3, "abc\n").exact and not read(llama3, " abc").exact
    assert read(llama3, "abc", cut=True) == Said("abc", 3, True, True, False)


def test_a_piece_behind_a_border_that_a_token_straddles_is_read_as_the_middle_of_a_text() -> None:
    """The prompt ends with a space, which joined would be the answer's first letters'."""
    template = VICUNA.replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}")
    tokenizer = sentencepiece(template)
    chat = Chat(tokenizer)
    prompt = chat.prompt_ids([QUESTION])
    assert tokenizer.convert_ids_to_tokens(prompt)[-1] == "▁"
    encoded = chat.encode([QUESTION, {"role": "assistant", "content": "beta"}])
    assert tokenizer.convert_ids_to_tokens(encoded.ids[len(prompt) :]) == ["beta", "</s>"]
    assert back(tokenizer, "beta", "</s>").exact


def test_held_out_conversations_that_are_not_exact_are_counted(chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def line(name: str, **more: object) -> dict:
        return {
            "id": name,
            "messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "a"}],
            **more,
        }

    lines = [
        *(line(f"h{i}", split="held_out", temperature=0.0, exact=i > 2) for i in range(6)),
        line("warm", split="held_out", temperature=0.8),
        *(line(f"t{i}", temperature=0.8, exact=i > 0) for i in range(5)),
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found, read = read_conversations(str(tmp_path / "c.jsonl"))
    parts = divide([found], Chat(chatml), max_length=100, over_length="cut", held_out=2, limit=3)
    train, held = parts.reports
    assert (train.kept, train.left_out) == (3, {"beyond data.limit": 2})
    assert (held.kept, held.left_out) == (2, {"beyond data.held_out": 1})
    assert held.dropped.total() == 4 and train.seen + held.seen == read.kept == 12
    parts = divide([found], Chat(chatml), max_length=100, over_length="cut", held_out=None, limit=None)
    assert parts.reports[0].noted == {"answers that read back as other tokens than were written": 1}


@pytest.mark.parametrize("held_out", [0, 1, 3])
def test_every_conversation_is_counted_once_where_none_is_marked(
    chatml: PreTrainedTokenizerFast, tmp_path: Path, held_out: int
) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"q{i % 7}"},
                {"role": "assistant", "content": "a" * (i % 3 * 60 + 1)},
            ],
            "temperature": 0.0,
        }
        for i in range(12)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found, read = read_conversations(str(tmp_path / "c.jsonl"))
    parts = divide([found], Chat(chatml), max_length=60, over_length="drop", held_out=held_out, limit=2)
    train, held = parts.reports
    assert held.kept == held_out and not held.dropped
    assert train.seen + held.seen == read.kept == 12
