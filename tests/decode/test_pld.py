"""Prompt lookup: what is found, what is not, and that it changes no text."""

from __future__ import annotations

import pytest
import torch
from decode_toys import PROMPTS, VOCAB, ToyTarget, greedy, run, seeded, table
from test_loop_sampling import p_value

from eagle3_lab.decode.methods import PromptLookup as PromptLookupMethod
from eagle3_lab.decode.propose.pld import PromptLookup
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.types import PADDING, TargetOut, Tree, Verdict

LOGITS = table(VOCAB, 0)
A, B, C, D, E, X = range(6)


def begun(texts: list[list[int]], proposer: PromptLookup) -> Tree:
    """The tree proposed when each text's last token is the root."""
    lengths = torch.tensor([len(text) - 1 for text in texts])
    prompt = torch.full((len(texts), int(lengths.max())), X)  # what pads a prompt is a real token and must not be found
    for b, text in enumerate(texts):
        prompt[b, : len(text) - 1] = torch.tensor(text[:-1])
    proposer.start(prompt, lengths, TargetOut(), prompt.shape[1] + 40, [])
    return proposer.propose(torch.tensor([text[-1] for text in texts]))


def drafts(tree: Tree) -> list[list[int]]:
    """Candidates below the root, row by row; checks that they are a chain with padding behind."""
    found = []
    for tokens, parents, candidate in zip(tree.tokens, tree.parents, tree.candidate, strict=True):
        count = int(candidate.sum())
        assert candidate[:count].all()
        assert parents.tolist() == [0, *range(count - 1), *[PADDING] * (len(tokens) - count)]
        found.append(tokens[1:count].tolist())
    return found


def looked_up(text: list[int], max_ngram: int, length: int, full: bool) -> list[int]:
    """The rule in plain Python: the longest n-gram first, of its occurrences the earliest."""
    for n in range(max_ngram, 0, -1):
        if n > len(text):
            continue
        for i in range(len(text) - n):
            follows = text[i + n : i + n + length]
            if text[i : i + n] == text[-n:] and (len(follows) == length or not full):
                return follows
    return []


# ------------------------------------------------------------------------------------------------------ by hand


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    text = [A, B, C, D, E, X, B, C]  # X B C never stood before, B C did
    assert drafts(begun([text], PromptLookup(3, 3))) == [[D, E, X]]
    assert drafts(begun([text], PromptLookup(3, 10, full=False))) == [[D, E, X, B, C]]


def test_a_longer_match_beats_an_earlier_one_and_of_equals_the_earliest_counts() -> None:
    text = [C, X, B, C, A, E, B, C, D, E, B, C]  # C at 0; B C at 2 and 6
    assert drafts(begun([text], PromptLookup(3, 2))) == [[D, E]]  # E B C at 5 is longest
    assert drafts(begun([text], PromptLookup(2, 2))) == [[A, E]]
    assert drafts(begun([text], PromptLookup(1, 2))) == [[X, B]]


def test_a_match_with_too_short_a_continuation_gives_way_only_where_full_ones_are_asked_for() -> None:
    text = [C, D, E, X, A, B, C, E, A, B, C]  # A B C at 4, followed by four tokens; C at 0 by ten
    assert drafts(begun([text], PromptLookup(3, 10, full=False))) == [[E, A, B, C]]
    assert drafts(begun([text], PromptLookup(3, 10))) == [[D, E, X, A, B, C, E, A, B, C]]


def test_nothing_found_is_the_root_alone() -> None:
    tree = begun([[A, B, C, D], [A]], PromptLookup())
    assert drafts(tree) == [[], []]
    assert (tree.tokens[:, 1:] == 0).all() and tree.q is None
    assert tree.tokens.shape[1] == PromptLookup().nodes == 11


def test_the_last_tokens_do_not_find_themselves_but_a_text_that_repeats_one_token_finds_the_rest() -> None:
    assert drafts(begun([[A, B]], PromptLookup(3, 1, full=False))) == [[]]
    assert drafts(begun([[A, A, A, A]], PromptLookup(3, 5, full=False))) == [[A]]
    assert drafts(begun([[A, A, A, A]], PromptLookup(1, 5, full=False))) == [[A, A, A]]


@pytest.mark.parametrize("full", [True, False])
def test_every_row_gets_what_the_rule_in_plain_python_finds(full: bool) -> None:
    rng = seeded(0)
    hits = 0
    for max_ngram, length in ((3, 10), (3, 2), (1, 4), (40, 3)):
        sizes = torch.randint(2, 30, (40,), generator=rng).tolist()
        texts = [torch.randint(4, (n,), generator=rng).tolist() for n in sizes]
        found = drafts(begun(texts, PromptLookup(max_ngram, length, full)))
        assert found == [looked_up(text, max_ngram, length, full) for text in texts]
        hits += sum(map(bool, found))
    assert hits > 60


def test_what_was_accepted_is_text_to_look_up_and_what_was_refused_is_not() -> None:
    proposer = PromptLookup(2, 3, full=False)
    tree = begun([[A, B, C, A, B], [A, B, C, A, B]], proposer)
    assert drafts(tree) == [[C, A, B], [C, A, B]]
    # Row 0 keeps C A and says D; row 1 has ended: it keeps nothing and its root stays.
    path = torch.tensor([[0, 1, 2], [PADDING] * 3])
    proposer.observe(tree, Verdict(path, torch.tensor([2, -1]), torch.tensor([D, B])), TargetOut())
    assert drafts(proposer.propose(torch.tensor([D, B]))) == [[], [C, A, B]]
    tree = proposer.propose(torch.tensor([A, B]))  # A B C A B C A A: "A A" is new, A stood first at 0
    assert drafts(tree) == [[B, C, A], [C, A, B]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((0, 10), "max_ngram must be >= 1, got 0"),
        ((3, 0), "length must be >= 1, got 0"),
        ((10**9, 10), "max_ngram must be at most 1024, got 1000000000"),
        ((3, 10**9), "length must be at most 1024, got 1000000000"),
    ],
)
def test_wrong_options_are_refused_when_the_yaml_is_read(options: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptLookupMethod(*options)


# ---------------------------------------------------------------------------------------------------------------- laws


def test_it_equals_vanilla_at_temperature_zero() -> None:
    truth = greedy(LOGITS)
    answers = run(ToyTarget(LOGITS), PromptLookup(3, 4, full=False), max_new_tokens=40)
    assert [a.tokens for a in answers] == truth
    assert sum(r.judged for a in answers for r in a.rounds) > 40
    assert sum(r.accepted for a in answers for r in a.rounds) > 0
    for b, prompt in enumerate(PROMPTS):
        (alone,) = run(ToyTarget(LOGITS), PromptLookup(3, 4, full=False), prompts=[prompt], max_new_tokens=40)
        assert alone == answers[b]


def test_an_end_token_and_a_context_stop_it() -> None:
    truth = greedy(LOGITS)
    for k in range(1, 12):
        end = truth[0][k]
        (answer,) = run(ToyTarget(LOGITS), PromptLookup(2, 3, full=False), prompts=PROMPTS[:1], end_tokens=(end,))
        assert answer.tokens == truth[0][: truth[0].index(end) + 1]
    answers = run(ToyTarget(LOGITS, 12), PromptLookup(2, 3, full=False), max_new_tokens=30)
    assert [a.tokens for a in answers] == [t[: 12 - len(p)] for t, p in zip(truth, PROMPTS, strict=True)]


def test_texts_follow_the_targets_law_at_temperature_one() -> None:
    assert p_value(PromptLookup(3, 3, full=False), ExactVerifier()) > 1e-3


def test_a_penalty_is_the_targets_alone() -> None:
    law = SamplingLaw(repetition_penalty=1.7)
    truth = greedy(LOGITS, law)
    answers = run(ToyTarget(LOGITS), PromptLookup(full=False), law, max_new_tokens=30)
    assert [a.tokens for a in answers] == [t[:30] for t in truth]
