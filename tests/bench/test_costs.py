"""Cost curves: measured by the loop itself, read between their points, and what they predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from random_targets import random_target

from eagle3_lab.backend.cuda_graphs import Record, Tape
from eagle3_lab.bench.costs import LOSSLESS, Cycle, Idle, Laps, Meter, answer, answer_seconds, between, curves
from eagle3_lab.bench.rival_generation import timed_answer
from eagle3_lab.bench.transformers_generate import plain
from eagle3_lab.decode.methods import PromptLookup
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Tree, Verdict

PROMPT = [5, 6, 7, 8, 9]


def test_a_curve_is_read_between_its_points_and_continued_beyond_them() -> None:
    curve = {4: 10.0, 1: 4.0, 8: 12.0}
    assert [between(curve, n) for n in (1, 2.5, 4, 6, 8, 12, 0)] == [4, 7, 10, 11, 12, 14, 4]
    assert between({3: 2.0}, 9) == 2
    with pytest.raises(ValueError, match="nothing was measured"):
        between({}, 1)


def test_an_answers_seconds_by_hand() -> None:
    """17 tokens, the first by the prefill of 3 s; tau 4: four rounds of half a second."""
    assert answer_seconds(17, tau=4.0, cycle=0.5, prefill=3.0) == 5.0
    assert answer_seconds(1, tau=0.0, cycle=0.5, prefill=3.0) == 3.0, "no round, so no tau"


def test_a_cycle_is_the_median_round() -> None:
    rounds = [{"draft": d, "verify": 2 * d, "host": 0.1} for d in (1.0, 9.0, 2.0)]
    cycle = Cycle.of(rounds)
    assert (cycle.draft, cycle.verify, cycle.host, cycle.seconds) == (2.0, 4.0, 0.1, 6.1)
    with pytest.raises(ValueError, match="no round was measured"):
        Cycle.of([])


def test_laps_are_the_stopwatchs_seconds_round_by_round() -> None:
    target, clock = random_target(), Laps()
    decoded = answer(target, Idle(3, 97), SamplingLaw(), PROMPT, 12, clock)
    assert len(clock.rounds) == len(decoded.rounds)
    total = clock.seconds()
    for stage in ("verify", "host"):
        assert sum(r[stage] for r in clock.rounds) == pytest.approx(total[stage])
    assert all(r["draft"] > 0 for r in clock.rounds)
    assert "prefill" not in clock.rounds[0]
    answer(target, Idle(3, 97), SamplingLaw(), PROMPT, 4, clock)
    assert len(clock.rounds) <= 3  # a new answer begins anew


def test_drafting_for_nothing_changes_no_answer() -> None:
    target = random_target()
    made = [answer(target, Idle(n, 97), SamplingLaw(), PROMPT, 16, Laps()).tokens for n in (1, 7)]
    assert made[0] == made[1]
    assert len(made[0]) == 16


def test_a_methods_own_verifier_judges_its_trees() -> None:
    class Refusing(ExactVerifier):
        """Lets no draft pass."""

        def __call__(self, p: torch.Tensor, tree: Tree, generators: Sequence[torch.Generator]) -> Verdict:
            return super().__call__(p, replace(tree, candidate=torch.zeros_like(tree.candidate)), generators)

        def follow(self, choice: torch.Tensor, tree: Tree) -> Verdict | None:
            return None

    target = random_target()
    proposer = PromptLookup(max_ngram=1, length=3, full=False).proposer(target.spec, None)
    told = [
        answer(target, proposer, SamplingLaw(), [5] * 6, 40, Laps(), verifier=verifier)
        for verifier in (LOSSLESS, Refusing())
    ]
    assert told[0].tokens == told[1].tokens
    assert sum(one.accepted for one in told[0].rounds) > sum(one.accepted for one in told[1].rounds) == 0


def test_an_answer_of_any_length_takes_no_more_room_than_the_context() -> None:
    target = random_target()
    context = target.spec.max_positions
    decoded = answer(target, Idle(3, 97), SamplingLaw(), PROMPT, 10**12, Laps())
    assert (len(decoded.tokens), decoded.ended) == (context - len(PROMPT), "context")
    tokens, _ = timed_answer(target, plain(), PROMPT, 10**12)
    assert tokens == context - len(PROMPT)


def test_every_size_is_measured_and_a_larger_one_costs_more_where_it_is_much_larger() -> None:
    target = random_target(hidden_size=64, intermediate_size=512)
    meter = Meter(target, headed(target), SamplingLaw(), PROMPT, nodes=(1, 300), widths=(1, 60), rounds=4)
    with pytest.raises(ValueError, match="no round was measured"):
        meter.curves()
    made = curves(meter, repeats=2)
    assert made.context == len(PROMPT)
    assert made.verify.keys() == made.forward.keys() == {1, 300}
    assert made.draft.keys() == {1, 60}
    assert made.forward[300] > made.forward[1] > 0
    assert made.verify[300].verify > made.verify[1].verify
    assert made.draft[1] > 0


@pytest.mark.parametrize("record", [None, Tape()])
def test_timing_a_level_leaves_the_proposer_as_it_was(record: Record | None) -> None:
    target = random_target()
    eagle = headed(target, record)
    prompt, lengths = torch.tensor([PROMPT]), torch.tensor([len(PROMPT)])
    out = target.open(1, 20, eagle.needs).prefill(prompt, lengths)
    trees = []
    for extra in (False, True):
        eagle.start(prompt, lengths, out, 40, [])
        eagle.propose(prompt[:, -1])
        for _ in range(2 * extra):
            eagle.draft_once(4)
        eagle._await(*held(eagle))
        trees.append(eagle.propose(prompt[:, 0]))
    assert trees[0].tokens.equal(trees[1].tokens)


def held(eagle: Eagle) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return eagle._features[:, :1], eagle._next[:, :1], torch.ones(1, dtype=torch.long), 1


def headed(target: HFTarget, record: Record | None = None) -> Eagle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        source, draft = FusedFeature(), Eagle3()
        draft.build(target, source.build(target), torch.arange(90))
    return Eagle(source.double(), draft.double(), Chain(3), target.spec.layers, record=record)
