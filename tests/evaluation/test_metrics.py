"""The numbers: rounds to tau, the hit table's two readings against a decoder, loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle3_lab.data.repetition import is_looping
from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.training.hit_table import Answer, HitTable, find_answers, judged_drafts, leading_hits, walk, walk_table
from eagle3_lab.types import PADDING, Round

# -------------------------------------------------------------------------------------------------- hand examples


def test_a_trace_of_four_rounds_gives_every_reading_by_hand() -> None:
    trace = [Round(min(a + 1, 3), a, a + 1) for a in (0, 2, 3, 1)]
    seen = Acceptance.of(trace, depth=3)
    assert (seen.rounds, seen.emitted, seen.judged, seen.accepted) == (4, 10, (4, 3, 2), (3, 2, 1))
    assert seen.per_slot == 6 / 12
    assert sum(seen.accepted) / seen.rounds == 1.5
    assert seen.tau == seen.engine_tau == 2.5
    assert seen.joint == (3 / 4, 2 / 4, 1 / 4)
    assert seen.n_alpha == (3 / 4, 2 / 3, 1 / 2)
    assert seen.histogram == (1, 1, 1, 1)


def test_a_round_cut_by_the_end_counts_what_it_emitted_and_the_engine_counts_it_whole() -> None:
    rounds = [Round(judged=3, accepted=3, emitted=4), Round(judged=1, accepted=1, emitted=1, overrun=2)]
    seen = Acceptance.of(rounds, depth=3)
    assert seen.tau == 5 / 2
    assert seen.engine_tau == (3 + 3) / 2 + 1


def test_no_rounds_read_as_nan_not_as_an_error() -> None:
    seen = Acceptance.of([], depth=2)
    assert all(math.isnan(x) for x in (seen.tau, seen.engine_tau, seen.per_slot, *seen.n_alpha, *seen.joint))
    assert seen.histogram == (0, 0, 0)


def test_acceptance_adds_up_and_refuses_rounds_deeper_than_its_depth() -> None:
    a, b = [Round(2, 1, 2)], [Round(2, 2, 3), Round(1, 0, 1)]
    assert Acceptance.of(a, 2) + Acceptance.of(b, 2) == Acceptance.of(a + b, 2)
    with pytest.raises(ValueError, match="depth must be at least the 2 levels that a round judged, got 1"):
        Acceptance.of(a, 1)


def test_answers_are_supervised_runs_within_one_document() -> None:
    #                           0  1  2  3  4  5  6  7 | 8  9 10 | -
    supervised = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]]).bool()
    document = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, PADDING]])
    # The third opens its document, so its first token serves as the prompt.
    assert find_answers(supervised, document) == [Answer(0, 1, 4), Answer(0, 5, 7), Answer(0, 8, 9)]
    assert judged_drafts(supervised, document, 2)[0].long().tolist() == [
        [0, 0],
        [1, 1],  # drafts tokens 3 and 4
        [1, 0],  # drafts token 4 only: 5 is no answer
        [0, 0],
        [0, 0],
        [1, 0],  # drafts token 7
        [0, 0],
        [0, 0],  # tokens 8, 9 belong to another document
        [0, 0],
        [0, 0],
        [0, 0],
        [0, 0],
    ]


def test_the_walk_by_hand_ends_with_an_accepted_last_token_and_no_bonus() -> None:
    leading = [0, 1, 0, 2, 0, 0, 0]
    assert walk(leading, anchor=1, last=6, depth=2) == [Round(2, 1, 2), Round(2, 2, 2)]


def test_no_round_starts_when_the_root_is_the_last_token() -> None:
    assert walk([0, 0, 0], anchor=0, last=1, depth=3) == []
    # Root 1 fails, its bonus is token 2, the last: one round, and no other.
    assert walk([0, 0, 0], anchor=0, last=2, depth=3) == [Round(1, 0, 1)]


def test_the_hit_table_reads_by_hand() -> None:
    # One prompt token, an answer at 1..5, depth 2. Anchors 0..3; draft 1 can be judged at anchors 0..2.
    hit = torch.tensor([[[1, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 1]]]).bool()
    supervised = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
    table = HitTable(depth=2)
    table.update(hit, supervised, torch.zeros(1, 6, dtype=torch.long))
    read = {name: value.item() for name, value in table.compute().items()}
    assert read["step_0/accuracy"] == pytest.approx(3 / 4)  # anchors 0..3: 1 0 1 1
    assert read["step_1/accuracy"] == pytest.approx(2 / 3)  # anchors 0..2: 0 1 1
    assert read["step_0/n_alpha_all"] == pytest.approx(3 / 4)
    assert read["step_1/n_alpha_all"] == pytest.approx(1 / 2)  # anchors 0 and 2 reach it, 2 passes
    assert (read["anchors"], read["tau_expected"]) == (3, pytest.approx(1 + (1 + 0 + 2) / 3))
    # Visited: anchor 0 keeps 1, so anchor 2 is next; its two drafts are tokens 4 and 5, and 5 is the last.
    assert (read["rounds"], read["tau_walked"]) == (2, pytest.approx((2 + 2) / 2))
    assert table.visited() == Acceptance(2, 4, 0, judged=(2, 2), accepted=(2, 1))


def test_a_repeated_eight_gram_is_a_loop_from_its_fourth_time() -> None:
    gram = tuple(range(8))
    assert not is_looping(gram * 3 + (99,))
    assert is_looping((*gram, 50, *gram, 51, *gram, 52, *gram))
    assert not is_looping((7,) * 10)  # three overlapping 8-grams
    assert is_looping((7,) * 11)
    assert not is_looping(())


# --------------------------------------------------------------------------------------------------- equivalences


def decode_chain(text: list[int], hits: list[list[bool]], prompt: int, depth: int) -> list[Round]:
    """A chain decoder in tokens: the target would write ``text`` after ``prompt`` tokens, ending as text ends."""
    written = text[: prompt + 1]  # the prefill's token belongs to no round
    rounds = []
    while len(written) < len(text):
        anchor = len(written) - 2
        drafts = [
            text[p] if p < len(text) and hits[anchor][s] else -1
            for s, p in enumerate(range(len(written), len(written) + depth))
        ]
        judged = accepted = emitted = 0
        for draft in drafts:
            if len(written) == len(text):  # the end token or the limit: nothing is judged behind it
                break
            judged += 1
            if draft != text[len(written)]:
                break
            written.append(draft)
            accepted, emitted = accepted + 1, emitted + 1
        if len(written) < len(text):
            written.append(text[len(written)])
            emitted += 1
        rounds.append(Round(judged, accepted, emitted))
    return rounds


def random_batch(seed: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed rows of two documents with answers of random lengths (some of one token), and random hits."""
    generator = torch.Generator().manual_seed(seed)
    width = 40
    supervised = torch.zeros(3, width, dtype=torch.bool)
    document = torch.full((3, width), PADDING)
    for row in range(3):
        at = 0
        for number in range(2):
            for _ in range(int(torch.randint(1, 3, (), generator=generator))):
                prompt, answer = torch.randint(1, 8, (2,), generator=generator).tolist()
                document[row, at : at + prompt + answer] = number
                supervised[row, at + prompt : at + prompt + answer] = True
                at += prompt + answer
    hit = torch.rand(3, width, depth, generator=generator) < 0.6
    return hit, supervised, document


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 3])
def test_the_walk_makes_a_chain_decoders_rounds_integer_for_integer(seed: int, depth: int) -> None:
    hit, supervised, document = random_batch(seed, depth)
    walked = walk_table(hit, supervised, document)
    answers = find_answers(supervised, document)
    assert len(answers) == len(walked) > 3
    for answer, rounds in zip(answers, walked, strict=True):
        text, hits = list(range(answer.last + 1)), hit[answer.row].tolist()
        assert rounds == decode_chain(text, hits, prompt=answer.anchor + 1, depth=depth)


@pytest.mark.parametrize("seed", range(4))
def test_all_anchors_equals_a_plain_count_over_anchors(seed: int) -> None:
    depth = 3
    hit, supervised, document = random_batch(seed, depth)
    table = HitTable(depth)
    table.update(hit, supervised, document)
    read = {name: value.item() for name, value in table.compute().items()}
    judged, right = [0] * depth, [0] * depth
    reached, passed = [0] * depth, [0] * depth
    whole: list[int] = []
    for answer in find_answers(supervised, document):
        for t in range(answer.anchor, answer.last - 1):  # the root t+1 is not the last token
            drafts = min(depth, answer.last - t - 1)
            row = hit[answer.row, t, :drafts].tolist()
            kept = (row + [False]).index(False)
            for s in range(drafts):
                judged[s] += 1
                right[s] += row[s]
                reached[s] += kept >= s
                passed[s] += kept > s
            if drafts == depth:
                whole.append(kept)
    for s in range(depth):
        assert read[f"step_{s}/accuracy"] == pytest.approx(right[s] / judged[s])
        assert read[f"step_{s}/n_alpha_all"] == pytest.approx(passed[s] / reached[s])
    assert read["tau_expected"] == pytest.approx(1 + sum(whole) / len(whole))


def test_batches_add_up_as_if_they_were_one() -> None:
    batches = [random_batch(seed, 3) for seed in (1, 2)]
    apart, joined = HitTable(3), HitTable(3)
    for batch in batches:
        apart.update(*batch)
    joined.update(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    assert apart.compute() == joined.compute()
    pooled = [r for batch in batches for rounds in walk_table(*batch) for r in rounds]
    assert joined.visited() == Acceptance.of(pooled, 3)


def test_a_batch_without_answers_leaves_readings_nan() -> None:
    table = HitTable(2)
    none = torch.zeros(1, 5, dtype=torch.bool)
    table.update(torch.ones(1, 5, 2, dtype=torch.bool), none, torch.zeros(1, 5, dtype=torch.long))
    read = table.compute()
    assert all(read[k].isnan() for k in ("tau_expected", "tau_walked", "step_0/accuracy", "step_1/n_alpha_walked"))
    with pytest.raises(ValueError, match="depth must be >= 1, got 0"):
        HitTable(0)


# ----------------------------------------------------------------------------------------------------------- laws


def test_runs_of_hits_part_the_two_readings_and_independent_hits_do_not() -> None:
    """Acceptance comes in runs: then the walk leaves good stretches in few rounds and tau_expected reads higher."""
    generator = torch.Generator().manual_seed(0)
    width, depth = 20_000, 4
    supervised = torch.ones(1, width, dtype=torch.bool)
    document = torch.zeros(1, width, dtype=torch.long)

    def readings(good: Tensor) -> tuple[float, float]:
        hit = torch.stack([good.roll(-s) for s in range(depth)], dim=-1)[None]  # the draft of a token is right or not
        table = HitTable(depth)
        table.update(hit, supervised, document)
        read = table.compute()
        return read["tau_expected"].item(), read["tau_walked"].item()

    expected, walked = readings(torch.rand(width, generator=generator) < 0.5)
    assert expected == pytest.approx(walked, abs=0.05)
    expected, walked = readings((torch.rand(width // 20, generator=generator) < 0.5).repeat_interleave(20))
    assert expected - walked > 0.5


def test_leading_hits_stop_at_the_first_miss_and_at_the_answers_end() -> None:
    hit = torch.tensor([[[1, 0, 1], [1, 1, 1]]]).bool()
    judged = torch.tensor([[[1, 1, 1], [1, 1, 0]]]).bool()
    assert leading_hits(hit, judged).tolist() == [[1, 2]]
