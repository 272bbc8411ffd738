"""Each optimizer step's metrics are in the store once, wherever the process before was ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tiny import TinyLab
from tiny_runs import Bench, make_bench

from eagle3_lab import load
from eagle3_lab.commands.fit import fit
from eagle3_lab.tracking.run import Run
from eagle3_lab.tracking.store import store_uri
from eagle3_lab.training.callbacks import Saver
from eagle3_lab.training.checkpoint import AtomicCheckpointIO
from eagle3_lab.training.module import DraftModule

WORDS = ("evaluate=null", "trainer.save_every_minutes=1.0e-9")
"""A training of 6 steps that saves at each and validates behind the third and the last."""

Patch = pytest.MonkeyPatch
Curves = dict[str, list[tuple[int, float]]]


class Killed(BaseException):
    """The end of a process, by kill -9: nothing that is written now is as it would have been."""


def kill(patch: Patch) -> None:
    """End this process outright: nobody saves on the way."""
    patch.setattr(Saver, "on_exception", lambda *_: None)
    raise Killed


def before_checkpoint(patch: Patch, step: int) -> None:
    save = AtomicCheckpointIO.save_checkpoint

    def saved(self: AtomicCheckpointIO, checkpoint: dict[str, Any], *rest: Any, **more: Any) -> None:
        if checkpoint["global_step"] == step:
            kill(patch)
        save(self, checkpoint, *rest, **more)

    patch.setattr(AtomicCheckpointIO, "save_checkpoint", saved)


def behind_checkpoint(patch: Patch, step: int) -> None:
    save = AtomicCheckpointIO.save_checkpoint

    def saved(self: AtomicCheckpointIO, checkpoint: dict[str, Any], *rest: Any, **more: Any) -> None:
        save(self, checkpoint, *rest, **more)
        if checkpoint["global_step"] == step:
            kill(patch)

    patch.setattr(AtomicCheckpointIO, "save_checkpoint", saved)


def long_behind_checkpoint(patch: Patch, step: int) -> None:
    """The last checkpoint is of the first step, and those up to ``step`` were logged since."""
    save = AtomicCheckpointIO.save_checkpoint

    def saved(self: AtomicCheckpointIO, checkpoint: dict[str, Any], *rest: Any, **more: Any) -> None:
        if checkpoint["global_step"] == 1:
            save(self, checkpoint, *rest, **more)
        if checkpoint["global_step"] == step:
            kill(patch)

    patch.setattr(AtomicCheckpointIO, "save_checkpoint", saved)


def in_validation(patch: Patch, step: int, end: Callable[[], None]) -> None:
    """Call ``end`` behind the first batch of the validation at ``step``."""

    def ended(self: DraftModule, *_: Any) -> None:
        if self.trainer.global_step == step:
            end()

    patch.setattr(DraftModule, "on_validation_batch_end", ended)


def killed_in_validation(patch: Patch, step: int) -> None:
    in_validation(patch, step, lambda: kill(patch))


def interrupted_in_validation(patch: Patch, step: int) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    in_validation(patch, step, interrupt)


def interrupted_in_log(patch: Patch, step: int, behind: bool) -> None:
    """Ctrl-C twice: the second strikes within the call that logs a step."""
    log, done = Run.log_metrics, []

    def logged(self: Run, values: Any, at: int = 0) -> None:
        if behind or done or at != step - 1:
            log(self, values, at)
        if at == step - 1 and not done:
            done.append(True)
            raise KeyboardInterrupt

    patch.setattr(Run, "log_metrics", logged)


def interrupted_before_log(patch: Patch, step: int) -> None:
    interrupted_in_log(patch, step, behind=False)


def interrupted_behind_log(patch: Patch, step: int) -> None:
    interrupted_in_log(patch, step, behind=True)


QUICK = {("behind_checkpoint", 3), ("long_behind_checkpoint", 5), ("interrupted_in_validation", 6)}


def marks(end: Callable[..., object], step: int) -> list[pytest.MarkDecorator]:
    """All but a few take part in the long run of the tests alone."""
    return [] if (end.__name__, step) in QUICK else [pytest.mark.slow]


ENDS = [
    (before_checkpoint, 2),
    (behind_checkpoint, 2),
    (behind_checkpoint, 3),
    (behind_checkpoint, 6),
    (long_behind_checkpoint, 5),
    (killed_in_validation, 3),
    (killed_in_validation, 6),
    (interrupted_in_validation, 3),
    (interrupted_in_validation, 6),
    (interrupted_before_log, 2),
    (interrupted_behind_log, 2),
]


def curves(bench: Bench) -> Curves:
    """Every point of training and validation, but for speeds."""
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    names = [n for n in run.data.metrics if n.startswith(("train/", "val/")) and "per_second" not in n]
    return {n: sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, n)) for n in names}


@pytest.fixture(scope="module")
def unbroken(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Curves]:
    """The curves of a run that nobody ended."""

    @cache
    def run(words: tuple[str, ...]) -> Curves:
        bench = make_bench(tiny, tmp_path_factory.mktemp("unbroken"))
        fit(load(str(bench.yaml), *WORDS, *words))
        return curves(bench)

    return run


def check(bench: Bench, end: Callable[[Patch, int], None], step: int, unbroken: Curves, *words: str) -> None:
    experiment = load(str(bench.yaml), *WORDS, *words)
    with Patch.context() as patch:
        end(patch, step)
        with pytest.raises((Killed, KeyboardInterrupt)):
            fit(experiment)
    (work,) = Path(bench.folder / "work").iterdir()
    assert not (work / "draft.ckpt").exists()
    fit(load(str(bench.yaml), *WORDS, *words))
    resumed = curves(bench)
    assert set(resumed) == set(unbroken)
    for name, points in unbroken.items():
        assert [at for at, _ in resumed[name]] == [at for at, _ in points], name
        assert [v for _, v in resumed[name]] == pytest.approx([v for _, v in points], rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize(
    ("end", "step"),
    [pytest.param(end, step, id=f"{end.__name__}-{step}", marks=marks(end, step)) for end, step in ENDS],
)
def test_a_resumed_run_has_each_step_once(
    bench: Bench,
    unbroken: Callable[[tuple[str, ...]], Curves],
    end: Callable[[Patch, int], None],
    step: int,
) -> None:
    found = unbroken(())
    assert [at for at, _ in found["train/loss"]] == [0, 1, 2, 3, 4, 5]
    assert [at for at, _ in found["val/loss"]] == [2, 5]
    check(bench, end, step, found)


@pytest.mark.slow
@pytest.mark.parametrize("end", [behind_checkpoint, interrupted_in_validation], ids=["killed", "interrupted"])
def test_a_training_by_passes_ends_behind_its_last_one(
    bench: Bench, unbroken: Callable[[tuple[str, ...]], Curves], end: Callable[[Patch, int], None]
) -> None:
    words = ("trainer.max_steps=-1", "trainer.max_epochs=2", "trainer.limit_train_batches=3")
    check(bench, end, 6, unbroken(words), *words)
