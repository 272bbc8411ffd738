"""The decoder at temperature 0: every proposer equals vanilla, and every ending is exact."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from decode_toys import PROMPTS, SCRIPTS, VOCAB, Scripted, ToyTarget, greedy, run, seeded, table
from torch import Tensor

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.rounds import block
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.timing import Clock, Stopwatch
from eagle3_lab.decode.trees import cut
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.types import Round, TargetOut, Tree, Verdict

LOGITS = table(VOCAB, 0)
VARIED = table(60, 3)
"""A larger vocabulary, so that an answer's first tokens differ from each other."""
CHAIN = SCRIPTS["always right"]
"""Five tokens a round: four drafts and the bonus."""


@functools.cache
def plain() -> list[tuple[int, ...]]:
    """What the target says by itself to the three prompts."""
    return greedy(LOGITS)


# --------------------------------------------------------------------------------------------------- one block, by hand


def blocked(remaining: int, ends: Sequence[int] = (), length: int = 2) -> tuple[list[int], list[int], Verdict]:
    """root 9 - 1: 5 - 2: 6 - 3: 7 of which two are accepted, the bonus being 8: tokens, counts, what to commit."""
    tree = Tree(torch.tensor([[9, 5, 6, 7]]), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 4, dtype=torch.bool))
    path = torch.tensor([[*range(length + 1), *[-1] * (3 - length)]])
    verdict = Verdict(path, torch.tensor([length]), torch.tensor([8]))
    piece = block(tree, verdict, torch.tensor(ends, dtype=torch.long), torch.tensor([remaining]))
    emitted = int(piece.emitted)
    counts = [int(x) for x in (piece.judged, piece.accepted, piece.emitted, piece.overrun, piece.ended)]
    return piece.tokens[0, :emitted].tolist(), counts, piece.verdict


def test_a_block_that_ends_nowhere_emits_its_drafts_and_the_bonus() -> None:
    tokens, counts, verdict = blocked(remaining=9)
    assert (tokens, counts) == ([5, 6, 8], [3, 2, 3, 0, 0])
    assert (verdict.path.tolist(), int(verdict.length), int(verdict.bonus)) == ([[0, 1, 2, -1]], 2, 8)


def test_an_accepted_end_token_ends_the_block_and_is_the_next_root() -> None:
    tokens, counts, verdict = blocked(remaining=9, ends=(4, 6))
    assert (tokens, counts) == ([5, 6], [2, 2, 2, 0, 1])
    assert (verdict.path.tolist(), int(verdict.length), int(verdict.bonus)) == ([[0, 1, -1, -1]], 1, 6)


def test_the_first_of_several_end_tokens_counts() -> None:
    assert blocked(remaining=9, ends=(8, 6, 5))[:2] == ([5], [1, 1, 1, 1, 1])


def test_an_end_token_beyond_the_limit_is_not_seen() -> None:
    assert blocked(remaining=1, ends=(6,))[:2] == ([5], [1, 1, 1, 1, 0])


def test_a_failed_draft_is_judged_only_where_the_bonus_is_emitted() -> None:
    assert blocked(remaining=3)[1] == [3, 2, 3, 0, 0]
    assert blocked(remaining=2)[1] == [2, 2, 2, 0, 0]


def test_a_path_to_a_leaf_judges_no_more_than_it_accepts() -> None:
    assert blocked(remaining=9, length=3)[1] == [3, 3, 4, 0, 0]


def test_a_row_that_has_ended_emits_and_keeps_nothing() -> None:
    tokens, counts, verdict = blocked(remaining=0, ends=(5,))
    assert (tokens, counts) == ([], [0, 0, 0, 0, 0])
    assert (verdict.path.tolist(), int(verdict.length), int(verdict.bonus)) == ([[-1] * 4], -1, 9)


# ----------------------------------------------------------------------------------------------------- equal to vanilla


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_proposer_equals_vanilla_at_temperature_zero(name: str) -> None:
    truth = plain()
    target = ToyTarget(LOGITS)
    answers = run(target, Scripted(SCRIPTS[name], truth), max_new_tokens=21)
    for b, answer in enumerate(answers):
        assert answer.tokens == truth[b][:21]
        assert answer.ended == "length"
        committed = target.ids[b, : target.lengths[b]].tolist()
        assert committed == [*PROMPTS[b], *answer.tokens[:-1]]  # all but the last, which is the root


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_proposer_equals_vanilla_where_logits_tie(name: str) -> None:
    tied = (LOGITS / 4).round()
    assert ((tied == tied.amax(-1, keepdim=True)).sum(-1) > 1).float().mean() > 0.3
    truth = greedy(tied)
    assert [a.tokens for a in run(ToyTarget(tied), Scripted(SCRIPTS[name], truth))] == [t[:20] for t in truth]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_proposer_equals_vanilla_under_a_repetition_penalty(name: str) -> None:
    law = SamplingLaw(repetition_penalty=1.7)
    truth = greedy(LOGITS, law)
    assert truth != plain()
    assert [a.tokens for a in run(ToyTarget(LOGITS), Scripted(SCRIPTS[name], truth), law)] == [t[:20] for t in truth]


@pytest.mark.parametrize(
    ("name", "judged", "accepted"),
    [
        ("always right", 4, 4),
        ("always wrong", 1, 0),
        ("right, then wrong", 3, 2),
        ("right only on the second child, on two levels", 3, 3),
        ("the same candidate twice, the longer path below the second", 2, 1),
        ("riders that carry the truth before the candidates", 2, 2),
        ("padding that carries the truth between", 1, 1),
        ("nothing but padding", 0, 0),
    ],
)
def test_rounds_count_what_was_judged_accepted_and_emitted(name: str, judged: int, accepted: int) -> None:
    answer = run(ToyTarget(LOGITS), Scripted(SCRIPTS[name], plain()), max_new_tokens=31)[0]
    assert set(answer.rounds[:-1]) == {Round(judged, accepted, accepted + 1)}
    assert sum(r.emitted for r in answer.rounds) == len(answer.tokens) - 1  # prefill's token belongs to no round


def test_vanilla_judges_nothing() -> None:
    answer = run(ToyTarget(LOGITS), Vanilla(), max_new_tokens=5)[0]
    assert answer.rounds == (Round(0, 0, 1),) * 4


# -------------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("name", ["always right", "right only on the second child, on two levels", "always wrong"])
def test_an_end_token_stops_exactly_there_wherever_it_stands_in_a_block(name: str) -> None:
    truth = greedy(VARIED, prompts=PROMPTS[:1])
    text = truth[0]
    firsts = {text.index(token) for token in text}
    assert set(range(7)) <= firsts  # prefill, all places of the first block with its bonus, and the next block's first
    for k in sorted(firsts):
        told: list[int] = []
        target = ToyTarget(VARIED)
        (answer,) = run(
            target,
            Scripted(SCRIPTS[name], truth),
            prompts=PROMPTS[:1],
            end_tokens=(text[k],),
            max_new_tokens=40,
            on_tokens=lambda row, tokens, accepted, told=told: told.extend(tokens),
        )
        assert answer.tokens == tuple(told) == text[: k + 1]
        assert answer.ended == "end"
        assert sum(r.emitted for r in answer.rounds) == k
        assert all(r.judged <= r.emitted for r in answer.rounds)
        assert target.ids[0, : target.lengths[0]].tolist() == [*PROMPTS[0], *text[:k]]


def test_an_accepted_end_token_ends_the_round_without_bonus() -> None:
    truth = greedy(VARIED, prompts=PROMPTS[:1])
    (answer,) = run(ToyTarget(VARIED), Scripted(CHAIN, truth), prompts=PROMPTS[:1], end_tokens=(truth[0][3],))
    assert answer.rounds == (Round(judged=3, accepted=3, emitted=3, overrun=1),)


def test_any_of_several_end_tokens_stops() -> None:
    truth = plain()
    ends = (truth[0][4], truth[0][2], truth[0][6])
    first = min(truth[0].index(e) for e in ends)
    answer = run(ToyTarget(LOGITS), Scripted(CHAIN, truth), end_tokens=ends)[0]
    assert (answer.tokens, answer.ended) == (truth[0][: first + 1], "end")


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_new_tokens_is_met_and_never_exceeded(limit: int) -> None:
    truth = plain()
    for script in (CHAIN, SCRIPTS["right, then wrong"], SCRIPTS["always wrong"]):
        answers = run(ToyTarget(LOGITS), Scripted(script, truth), max_new_tokens=limit)
        assert [a.tokens for a in answers] == [t[:limit] for t in truth]
        assert {a.ended for a in answers} == {"length"}
        for answer in answers:
            assert sum(r.emitted for r in answer.rounds) == limit - 1
            assert all(r.judged <= r.emitted and r.accepted <= r.judged for r in answer.rounds)


def test_an_end_token_in_the_last_allowed_place_is_an_end() -> None:
    truth = plain()
    k = max(truth[0].index(token) for token in truth[0][:6])
    answer = run(ToyTarget(LOGITS), Scripted(CHAIN, truth), max_new_tokens=k + 1, end_tokens=(truth[0][k],))[0]
    assert (answer.tokens, answer.ended) == (truth[0][: k + 1], "end")


@pytest.mark.parametrize("context", range(6, 16))
def test_the_context_limit_stops_and_no_forward_passes_it(context: int) -> None:
    truth = plain()
    for name in SCRIPTS:
        target = ToyTarget(LOGITS, context)  # asserts that no node stands at a position past its limit
        answers = run(target, Scripted(SCRIPTS[name], truth), max_new_tokens=30)
        for b, answer in enumerate(answers):
            assert answer.tokens == truth[b][: context - len(PROMPTS[b])]
            assert answer.ended == "context"


def test_a_limit_that_both_set_is_called_length() -> None:
    answers = run(ToyTarget(LOGITS, 10), Vanilla(), prompts=PROMPTS[:1], max_new_tokens=5)
    assert (len(answers[0].tokens), answers[0].ended) == (5, "length")


def test_rows_end_at_their_own_times_and_stay_as_they_ended() -> None:
    truth = plain()
    ends = (truth[0][1],)
    target = ToyTarget(LOGITS)
    told: list[tuple[int, tuple[int, ...]]] = []
    answers = run(target, Scripted(CHAIN, truth), end_tokens=ends, max_new_tokens=33,
                  on_tokens=lambda row, tokens, accepted: told.append((row, tuple(tokens))))  # fmt: skip
    lengths = {len(a.tokens) for a in answers}
    assert len(lengths) > 1
    for b, answer in enumerate(answers):
        stop = truth[b].index(ends[0]) + 1 if ends[0] in truth[b][:33] else 33
        assert answer.tokens == truth[b][:stop]
        assert int(target.lengths[b]) == len(PROMPTS[b]) + stop - 1
        assert sum((tokens for row, tokens in told if row == b), ()) == answer.tokens
    assert all(tokens for _, tokens in told)


# --------------------------------------------------------------------------- what laws and proposers are told


def test_a_law_is_told_the_committed_tokens_without_the_root() -> None:
    target = ToyTarget(LOGITS)
    calls = 0

    class Watching(SamplingLaw):
        def probs(self, logits: Tensor, ids: Tensor, tree: Tree) -> Tensor:
            nonlocal calls
            calls += 1
            for b, row in enumerate(ids):
                committed = row[row >= 0].tolist()
                assert row[: len(committed)].tolist() == committed  # padding behind only
                told = [*committed, int(tree.tokens[b, 0])] if calls == 1 else committed
                assert told == target.ids[b, : target.lengths[b]].tolist()  # prefill's root is the prompt's last token
            return super().probs(logits, ids, tree)

    truth = plain()
    run(target, Scripted(SCRIPTS["right only on the second child, on two levels"], truth), Watching())
    assert calls > 4


def test_past_its_positions_a_proposer_is_neither_asked_nor_told() -> None:
    truth = plain()
    for positions in (1, 2, 4, 6, 9, 14):
        proposer = Scripted(CHAIN, truth, positions)
        proposer.start(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), TargetOut(), 0, [])
        answers = run(ToyTarget(LOGITS), proposer, max_new_tokens=20)
        assert [a.tokens for a in answers] == [t[:20] for t in truth]
        for places in proposer.proposed_at:  # some row's root still stood before the end of positions
            assert min(len(p) + place for p, place in zip(PROMPTS, places, strict=True)) < positions
        drafted = [sum(r.judged for r in a.rounds) for a in answers]
        for b, prompt in enumerate(PROMPTS):
            assert (drafted[b] > 0) == (len(prompt) < positions)
        assert len(answers[0].rounds) > 4


def test_a_rows_rounds_do_not_depend_on_the_other_rows() -> None:
    truth = plain()
    for positions in (None, 9):
        together = run(ToyTarget(LOGITS), Scripted(CHAIN, truth, positions))
        for b, prompt in enumerate(PROMPTS):
            (alone,) = run(ToyTarget(LOGITS), Scripted(CHAIN, truth[b : b + 1], positions), prompts=[prompt])
            assert alone == together[b]


def test_what_is_committed_and_observed_is_no_wider_than_the_longest_path() -> None:
    widths = []

    class Watching(Scripted):
        def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
            super().observe(tree, verdict, out)
            widths.append(verdict.path.shape[1])

    run(ToyTarget(LOGITS), Watching(SCRIPTS["right, then wrong"], plain()))
    assert set(widths) == {3}


def test_padding_behind_the_last_node_is_not_scored_and_proposer_and_law_see_all_places() -> None:
    scored, observed = [], []

    class Sized(ToyTarget):
        def score(self, tree: Tree) -> TargetOut:
            scored.append(tree.tokens.shape[1])
            return super().score(tree)

    class Padding(Scripted):
        """Every second round its last two drafts become padding."""

        def propose(self, root: torch.Tensor) -> Tree:
            tree = super().propose(root)
            return cut(tree, torch.full_like(root, 1)) if len(observed) % 2 else tree

        def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
            super().observe(tree, verdict, out)
            assert out.logits is not None
            observed.append((tree.tokens.shape[1], out.logits.shape[1]))
            assert (out.logits[:, scored[-1] :] == 0).all()

    made = run(Sized(LOGITS), Padding(CHAIN, plain()))
    assert [one.tokens for one in made] == [tokens[:20] for tokens in plain()]
    nodes = Padding(CHAIN, plain()).nodes
    assert set(scored) == {2, nodes}
    assert set(observed) == {(nodes, nodes)}


# ------------------------------------------------------------------------------------------- time and faults


def test_without_a_clock_no_time_is_booked_and_with_one_the_stages_are() -> None:
    (quiet,) = run(ToyTarget(LOGITS), Vanilla(), prompts=PROMPTS[:1])
    assert quiet.seconds == {}
    ids, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])

    class Ticking(Stopwatch):
        """One second a look."""

        ticks = 0.0

        def _now(self) -> float:
            self.ticks += 1
            return self.ticks

    for clock, told in ((Clock(), set()), (Ticking("cpu"), {"prefill", "draft", "verify", "host"})):
        answers = decode(
            ToyTarget(LOGITS), Vanilla(), SamplingLaw(), ExactVerifier(), ids, lengths, max_new_tokens=4, end_tokens=(),
            context_limit=99, generators=[seeded(0), seeded(1)], clock=clock,
        )  # fmt: skip
        assert all(set(a.seconds) == told for a in answers)
    # three rounds, shared by two rows: draft is propose and (but for the last round) observe
    assert answers[0].seconds == {"prefill": 0.5, "draft": 2.5, "verify": 1.5, "host": 1.5}


def test_a_stopwatch_measures_wall_time() -> None:
    clock = Stopwatch()
    clock.start()
    clock.lap("a")
    clock.lap("b")
    clock.lap("a")
    assert set(clock.seconds()) == {"a", "b"}
    assert all(0 <= s < 60 for s in clock.seconds().values())
    clock.start()
    assert clock.seconds() == {}


@pytest.mark.parametrize(
    ("prompts", "context", "words"),
    [
        ([[1, 2], []], 50, "prompt 1 of the batch is empty"),
        ([[1] * 7], 7, "prompt 0 of the batch has 7 tokens, .* context of 7; shorten it to at most 6"),
        ([[1] * 9], 7, "has 9 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompts: list[list[int]], context: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(ToyTarget(LOGITS, context), Vanilla(), prompts=prompts)


def test_wrong_arguments_are_refused_with_their_values() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be >= 1, got 0"):
        run(ToyTarget(LOGITS), Vanilla(), max_new_tokens=0)
    with pytest.raises(ValueError, match="generators must be one a row: 3 rows, got 2"):
        run(ToyTarget(LOGITS), Vanilla(), seeds=[1, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_an_error_and_no_token(temperature: float) -> None:
    class Broken(ToyTarget):
        def score(self, tree: Tree) -> TargetOut:
            logits = super().score(tree).logits
            assert logits is not None
            logits[1, 0, 3] = torch.nan
            return TargetOut(logits=logits)

    with pytest.raises(UserError, match="NaN in row 1 .* use bfloat16 or float32"):
        run(Broken(LOGITS), Vanilla(), SamplingLaw(temperature))


def test_the_verdict_is_read_from_the_device_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def counted(name: str) -> None:
        plain = getattr(Tensor, name)

        def reading(self: Tensor, *args: object) -> object:
            nonlocal reads
            reads += 1
            return plain(self, *args)

        monkeypatch.setattr(Tensor, name, reading)

    class Silent(Vanilla):
        """One wrong draft, so that there is something to judge."""

        nodes = 2

        def propose(self, root: Tensor) -> Tree:
            tokens = torch.stack((root, torch.full_like(root, 3)), 1)
            return Tree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))

    class Still(ToyTarget):
        """The toy's own checks read tensors; here nobody checks."""

        def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOut:
            return TargetOut(logits=self.table[: len(ids), None])

        def score(self, tree: Tree) -> TargetOut:
            return TargetOut(logits=self.table[tree.tokens])

        def commit(self, verdict: Verdict) -> None:
            pass

    ids, lengths, generators = torch.tensor([[1, 2]]), torch.tensor([2]), [seeded(0)]
    # the CPU asks how far a tree extends, since it waits for nothing; a device that is waited for does not
    monkeypatch.setattr("eagle3_lab.decode.loop.extent", lambda tree: tree.tokens.shape[1])
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        counted(name)
    (answer,) = decode(
        Still(LOGITS), Silent(), SamplingLaw(1.0), ExactVerifier(), ids, lengths, max_new_tokens=9, end_tokens=(5,),
        context_limit=99, generators=generators,
    )  # fmt: skip
    assert reads == len(answer.rounds) + 2  # and the prompts' lengths, and prefill's token
