"""The LightningModule: accumulation is exact, and a checkpoint is always of a whole optimizer step."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from random_targets import random_target

from eagle3_lab.data.conversations import Conversation
from eagle3_lab.data.documents import Document
from eagle3_lab.data.packing import PackedRows, RowLoader, RowOrder
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.training.callbacks import Saver
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import Reduction, UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
]

LENGTH = 16
# Supervised tokens at the end of each document: rows of nothing, of little and of much, in no order.
UNEVEN = ((16, 0), (16, 13), (15, 3), (16, 0), (16, 4), (14, 9), (16, 0), (13, 2), (16, 12))


def uneven() -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    one = Conversation("one", ())
    return [
        Document(one, torch.randint(97, (size,), generator=draw).int(), torch.arange(size) >= size - answer)
        for size, answer in UNEVEN
    ]


def loader(rows: int, *, seed: int | None = 0, rank: int = 0, world: int = 1) -> RowLoader:
    found = uneven()
    order = RowOrder([LENGTH] * len(found), LENGTH, rows_per_batch=rows, seed=seed, rank=rank, world=world)
    return RowLoader(PackedRows(found, LENGTH), order, f"uneven, {rows}")


def module(reduction: Reduction = "supervised") -> DraftModule:
    torch.manual_seed(0)
    target, source, draft = random_target(), FusedFeature(), Eagle3()
    draft.build(target, source.build(target), torch.arange(60))
    loss = UnrolledLoss([SoftCE()], 0.8, reduction=reduction)
    return DraftModule(target, source, draft, Unroll(3), loss, Optimization(lr=1e-2, warmup=0.3)).double()


class Curve(DummyLogger):
    """Remembers what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append({k: v for k, v in metrics.items() if k not in ("epoch", "train/tokens_per_second")})


def trainer(steps: int, *, accumulate: int = 1, logger: Any = False, callbacks: Any = (), **more: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        logger=logger,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        **more,
    )


def trained(rows: int, accumulate: int, steps: int = 8, reduction: Reduction = "supervised") -> tuple[Any, Curve]:
    head, curve = module(reduction), Curve()
    trainer(steps, accumulate=accumulate, logger=curve).fit(head, loader(rows))
    return head, curve


def test_what_all_ranks_hold_together_is_what_each_holds_alone() -> None:
    parts = [loader(2, rank=rank, world=3) for rank in range(3)]
    running = [iter(part) for part in parts]
    for batch in range(len(parts[0])):
        alone = [next(one) for one in running]
        for part in parts:
            (together,) = part.together(range(batch, batch + 1))
            ours = sorted(map(tuple, torch.cat([one.ids for one in alone]).tolist()))
            assert sorted(map(tuple, together.ids.tolist())) == ours


@pytest.mark.parametrize("reduction", ["supervised", "all"])
def test_accumulated_batches_train_as_one_large_batch_does(reduction: Reduction) -> None:
    """Nine rows by two: the last step of each epoch is one row short; some batches have nothing supervised."""
    empty = [not batch.supervised.any() for batch in loader(1)]
    assert any(empty) and len(empty) % 2 == 1
    (large, one), (small, several) = trained(2, 1, reduction=reduction), trained(1, 2, reduction=reduction)
    if reduction == "supervised":  # under "all" the padding row of a short batch counts, so those steps differ
        assert len(one.points) == len(several.points) == 8
        for left, right in zip(one.points, several.points, strict=True):
            assert left == pytest.approx(right, abs=1e-6)
        for left, right in zip(large.parameters(), small.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
    else:
        for left, right in zip(one.points[:4], several.points[:4], strict=True):
            assert left == pytest.approx(right, abs=1e-6)


def test_three_at_a_time_is_three_at_once() -> None:
    (large, one), (small, several) = trained(3, 1), trained(1, 3)
    assert one.points == [pytest.approx(point, abs=1e-6) for point in several.points]
    for left, right in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_validation_loss_does_not_depend_on_how_the_rows_are_divided() -> None:
    told = []
    for rows in (1, 2, 9):
        (read,) = trainer(1).validate(module(), loader(rows, seed=None), verbose=False)
        told.append(read)
    assert "val/loss" in told[0] and told[0]["val/loss"] > 1
    assert told[1:] == [pytest.approx(told[0], abs=1e-6, nan_ok=True)] * 2


class Stop(lightning.Callback):
    """Ends training within batch ``at``, or after it."""

    def __init__(self, at: int, within: bool) -> None:
        self.at, self.within, self.count = at, within, 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.within and self.count == self.at:
            raise RuntimeError("stopped")

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1
        if not self.within and self.count == self.at:
            raise RuntimeError("stopped")


def saver(folder: Path, minutes: float) -> Saver:
    every = timedelta(minutes=minutes)
    return Saver(
        dirpath=folder,
        filename="last",
        train_time_interval=every,
        save_top_k=1,
        enable_version_counter=False,
        save_on_exception=True,
    )


@pytest.mark.parametrize("minutes", [0.0, 60.0], ids=["saved at each step", "saved on the way out"])
@pytest.mark.parametrize("within", [False, True])
def test_a_run_stopped_within_an_accumulation_ends_as_one_that_was_not(
    minutes: float, within: bool, tmp_path: Path
) -> None:
    whole, _ = trained(1, 3, steps=4)
    for at in (2, 3, 4):
        folder = tmp_path / str(at)
        with pytest.raises(RuntimeError, match="stopped"):
            trainer(4, accumulate=3, callbacks=[Stop(at, within), saver(folder, minutes)]).fit(module(), loader(1))
        last = folder / "last.ckpt"
        assert last.is_file() == (at >= 3 if minutes == 0 else at == 3 and not within), at
        if last.is_file():
            saved = torch.load(last, weights_only=True)
            progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
            assert progress == 3 * saved["global_step"], "nothing is saved within an accumulation"
        head = module()
        resumed = trainer(4, accumulate=3, callbacks=[saver(folder, minutes)])
        resumed.fit(head, loader(1), ckpt_path=str(last) if last.is_file() else None, weights_only=True)
        for left, right in zip(whole.parameters(), head.parameters(), strict=True):
            assert torch.equal(left, right), at
