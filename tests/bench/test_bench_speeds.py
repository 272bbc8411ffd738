"""Everyone in turns, and what is said of a method's measured answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from random_targets import random_target

from eagle3_lab.bench import speeds as bench_speeds
from eagle3_lab.bench.costs import Curves, Cycle, Laps, Meter, answer
from eagle3_lab.bench.speeds import Contestant, _rounds, _speed, speeds
from eagle3_lab.data.tasks import Task
from eagle3_lab.decode.methods import PromptLookup
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.evaluation.runner import Evaluation
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import Decoded

PROMPTS = [[5, 6, 7], [8, 9, 10], [11, 12]]


def test_who_answers_first_changes_from_prompt_to_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    target, law = random_target(), SamplingLaw(temperature=1.0)  # beside which there is no rival
    lookup = PromptLookup(max_ngram=1, length=2, full=False)
    contestants = [Contestant("vanilla", Vanilla()), Contestant("lookup", lookup.proposer(target.spec, None))]
    order: list[str] = []
    answered = bench_speeds._answer

    def seen(target: object, one: Contestant, *more: Any) -> object:
        order.append(one.name)
        return answered(target, one, *more)

    monkeypatch.setattr(bench_speeds, "_answer", seen)
    meter = Meter(target, None, law, PROMPTS[0], nodes=(1, 3), rounds=1)
    evaluation = Evaluation([Task("held_out")], {"lookup": lookup}, max_new_tokens=6)
    found, rivals, _ = speeds(TargetChoice(), target, contestants, law, evaluation, PROMPTS, [[5] * 6], meter, 1)
    assert order == ["vanilla", "lookup", "lookup", "vanilla", "vanilla", "lookup"]
    assert ([one.name for one in found], rivals) == (["vanilla", "lookup"], [])


def test_a_calibrations_first_round_is_not_counted() -> None:
    """It reads the prompt: what no later round does."""
    target, law = random_target(), SamplingLaw()
    ends: Sequence[int] = target.spec.end_tokens
    rounds = answer(target, Vanilla(), law, PROMPTS[0], 7, Laps(), end_tokens=ends).rounds
    found = _rounds(target, Contestant("vanilla", Vanilla()), law, PROMPTS[0], 7, seed=0)
    assert [size for size, _ in found] == [1] * (len(rounds) - 1)


def test_answers_of_one_token_are_predicted_by_their_prefill() -> None:
    curves = Curves(5, {1: Cycle(0.0, 2.0, 0.5)}, {1: 1.5})
    one = Decoded((7,), (), "end", {"prefill": 4.0})
    speed = _speed(Contestant("vanilla", Vanilla()), [(one, 5.0)], [], {1: 0.0}, curves, 0.2)
    assert (speed.tau, speed.predicted, speed.tokens_per_s) == (0.0, 0.25, 0.2)
