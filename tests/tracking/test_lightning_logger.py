"""Lightning's self.log lands in our run, one call a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from eagle3_lab.tracking.lightning_logger import RunLogger
from eagle3_lab.tracking.run import Run


class RecordingRun(Run):
    """A run without a store: keeps what is logged."""

    def __init__(self) -> None:
        self.name, self.id, self.folder = "tiny", "0123", Path("mlruns")
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.params: list[Mapping[str, object]] = []

    def log_metrics(self, values: Mapping[str, int | float], step: int = 0) -> None:
        self.metrics.append((step, dict(values)))

    def steps_of(self, key: str) -> set[int]:
        return {step for step, values in self.metrics if key in values}

    def log_params(self, tree: Mapping[str, object]) -> None:
        self.params.append(tree)


class Tiny(pl.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log_dict({"train/loss": loss, "train/step_0/accuracy": torch.tensor(0.5)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(logger: RunLogger, folder: Path) -> None:
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Tiny(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))


def test_what_a_step_logs_arrives_in_one_call(tmp_path: Path) -> None:
    run = RecordingRun()
    logger = RunLogger(run)
    fit(logger, tmp_path)
    assert [step for step, _ in run.metrics] == [1, 3]
    assert all({"train/loss", "train/step_0/accuracy"} <= values.keys() for _, values in run.metrics)
    assert run.metrics[0][1]["train/loss"] > run.metrics[1][1]["train/loss"]
    assert run.params == [{"width": 2}]
    assert (logger.name, logger.version, logger.save_dir) == ("tiny", "0123", "mlruns")


def test_a_rank_without_a_run_logs_nothing_and_trains(tmp_path: Path) -> None:
    logger = RunLogger(None)
    fit(logger, tmp_path)
    assert (logger.name, logger.version, logger.save_dir) == (None, None, None)
