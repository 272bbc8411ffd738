"""What is said of a method's measured answers."""

from __future__ import annotations

from eagle3_lab.commands.bench_speeds import Contestant, _speed
from eagle3_lab.costs import Curves, Cycle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.types import Decoded


def test_answers_of_one_token_are_predicted_by_their_prefill() -> None:
    curves = Curves(5, {1: Cycle(0.0, 2.0, 0.5)}, {1: 1.5})
    one = Decoded((7,), (), "end", {"prefill": 4.0})
    speed = _speed(Contestant("vanilla", Vanilla()), [(one, 5.0)], [], {1: 0.0}, curves, 0.2)
    assert (speed.tau, speed.predicted, speed.tokens_per_s) == (0.0, 0.25, 0.2)
