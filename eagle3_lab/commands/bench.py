"""`bench`: how fast this machine trains or decodes an experiment's head, and what holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from eagle3_lab.commands.bench_train import bench_train
from eagle3_lab.experiment import Experiment


def bench(
    experiment: Experiment,
    *,
    what: Literal["train"],
    steps: int = 5,
    rows: Literal["all", "data"] = "all",
    memory: bool = True,
    rival: Path | None = None,
    json: Path | None = None,
) -> None:
    """Measure one training step of an experiment, of any shape that overrides say (``--data.row_length``,
    ``--model.unroll.depth``, ``--model.draft_vocab``, ``--trainer.products``).

    Args:
        experiment: whose step is measured; nothing is trained or logged.
        what: ``train``.
        steps: how many steps are timed, after one that warms up.
        rows: which rows have a loss: ``all``, as public trainers compute it, or those of the ``data``'s answers.
        memory: measure peak memory as well, in processes of their own.
        rival: the Python of an environment with speculators in it (``make bench-rival`` makes one); its step is timed
            beside ours, one after the other.
        json: also write the measurements there, for machines.
    """
    bench_train(experiment, steps=steps, every_row=rows == "all", memory=memory, rival=rival, json=json)


bench.positional = "what"  # pyright: ignore[reportFunctionMemberAccess]
