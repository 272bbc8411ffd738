"""The trainer's options: what is refused before anything is trained, since Lightning takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger

from eagle3_lab.errors import UserError
from eagle3_lab.training.checkpoint import AtomicCheckpointIO
from eagle3_lab.training.trainer import Training, quiet_lightning


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"accumulate_grad_batches": 0}, "trainer.accumulate_grad_batches must be >= 1, got 0"),
        ({"accumulate_grad_batches": -1}, "trainer.accumulate_grad_batches must be >= 1, got -1"),
        ({"check_val_every_n_epoch": 0}, "trainer.check_val_every_n_epoch must be >= 1, got 0"),
        ({"val_check_interval": 0}, "trainer.val_check_interval must be a number from 1 or a share in (0.0, 1.0]"),
        ({"val_check_interval": 0.0}, "trainer.val_check_interval must be a number from 1 or a share in (0.0, 1.0]"),
        ({"limit_train_batches": 0}, "trainer.limit_train_batches must be a number from 1 or a share in (0.0, 1.0]"),
        ({"gradient_clip_val": -1}, "trainer.gradient_clip_val must be >= 0, got -1"),
        ({"gradient_clip_val": math.nan}, "trainer.gradient_clip_val must be >= 0, got nan"),
        ({"num_sanity_val_steps": -5}, "trainer.num_sanity_val_steps must be >= -1, got -5"),
        ({"num_nodes": 0}, "trainer.num_nodes must be >= 1, got 0"),
        ({"log_every_n_steps": 0}, "trainer.log_every_n_steps must be >= 1 or null, got 0"),
        ({"log_every_n_steps": -1}, "trainer.log_every_n_steps must be >= 1 or null, got -1"),
        ({"save_every_minutes": math.nan}, "trainer.save_every_minutes must be > 0 and at most 1000000, got nan"),
        ({"save_every_minutes": 1e15}, "trainer.save_every_minutes must be > 0 and at most 1000000, got 1000000000"),
    ],
)
def test_a_value_outside_its_range_is_told_with_its_key(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError) as told:
        Training(max_steps=2, **options)
    assert str(told.value).startswith(fault)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"max_steps": -1, "max_epochs": 0},
            "trainer.max_steps or trainer.max_epochs must be >= 1: the schedule",
        ),
        ({"max_epochs": 0}, "trainer.max_epochs must be >= 1, -1 for no limit, or null, got 0"),
        ({"max_epochs": -3}, "trainer.max_epochs must be >= 1, -1 for no limit, or null, got -3"),
        ({"fast_dev_run": True}, "trainer.fast_dev_run is True, which saves no head: leave it out, and set "),
        ({"max_time": "00:00:00:00"}, "trainer.max_time is 00:00:00:00, which would leave a head in the middle of its"),
        ({"callbacks": [Timer("00:00:00:01")]}, "trainer.callbacks holds a Timer, which would leave a head in the "),
    ],
)
def test_a_training_that_would_not_reach_its_last_step_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError) as told:
        Training(**({"max_steps": 2} | options))
    assert str(told.value).startswith(fault)


def test_the_ends_of_the_ranges_are_taken(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_sanity_val_steps": -1, "gradient_clip_val": 0, "check_val_every_n_epoch": None}
    options |= {"val_check_interval": 1, "limit_train_batches": 1.0, "fast_dev_run": False, "accelerator": "cpu"}
    trainer = Training(max_epochs=1, log_every_n_steps=1, **options).make(
        DummyLogger(), [], AtomicCheckpointIO(), "32-true", tmp_path
    )
    assert (trainer.max_epochs, trainer.max_steps, trainer.val_check_interval) == (1, -1, 1)


class Batches:
    """A pass of seven."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1, 32)] * 7)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, 14),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 8),  # a pass's last step takes the one batch that is left
        ({"max_epochs": 2, "accumulate_grad_batches": 2, "max_steps": 5}, 5),
        ({"max_epochs": 1, "max_steps": 50}, 7),
        ({"max_steps": 9}, 9),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 3, "limit_train_batches": 99}, 21),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 9),
    ],
)
def test_a_training_has_as_many_steps_as_it_says(options: dict[str, Any], steps: int, tmp_path: Path) -> None:
    training = Training(limit_val_batches=0, accelerator="cpu", **options)
    trainer = training.make(DummyLogger(), [], AtomicCheckpointIO(), "32-true", tmp_path)
    with quiet_lightning():
        trainer.fit(BoringModel(), train_dataloaders=Batches())
    assert trainer.global_step == training.steps(7) == steps


def test_without_an_end_it_has_lightnings_thousand_passes() -> None:
    assert Training().steps(7) == 7000


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"limit_train_batches": 0.1},
            "trainer.limit_train_batches: 0.1 of 7 batches is less than one; more than 0.14, or a number of batches",
        ),
        ({"val_check_interval": 8}, "trainer.val_check_interval: 8 steps, but a pass over the data has 7; at most "),
        (
            {"val_check_interval": 4, "limit_train_batches": 0.5},
            "trainer.val_check_interval: 4 steps, but a pass over the data has 3; at most that, or ",
        ),
        (
            {"val_check_interval": 4, "limit_train_batches": 3},
            "trainer.val_check_interval: 4 steps, but a pass over the data has 3; at most that, or ",
        ),
    ],
)
def test_what_a_pass_has_no_room_for_is_told_with_its_key(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError) as told:
        Training(max_steps=2, **options).check(7)
    assert str(told.value).startswith(fault)
    Training(max_steps=2, val_check_interval=4, limit_train_batches=0.6).check(7)


@pytest.mark.parametrize("devices", ["abc", -1, [0]])
def test_devices_that_lightning_cannot_read_are_told_with_their_key(devices: object, tmp_path: Path) -> None:
    options: dict[str, Any] = {"devices": devices, "accelerator": "cpu"}
    with pytest.raises(UserError) as told:
        Training(max_steps=2, **options).make(DummyLogger(), [], AtomicCheckpointIO(), "32-true", tmp_path)
    assert str(told.value).startswith(f"trainer.devices: {devices!r}: ")
    assert str(told.value).endswith("should be an int > 0.")
