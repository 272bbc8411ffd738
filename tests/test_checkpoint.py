"""Checkpoints on the disk: whole or not there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from eagle3_lab.checkpoint import AtomicCheckpointIO, read
from eagle3_lab.errors import UserError


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within, no file of this process grows beyond ``size`` bytes: what a full disk does in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_midway_is_one_line_and_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    io, place = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"weights": torch.arange(5)}, place)
    with files_of_at_most(100_000), pytest.raises(UserError) as told:
        io.save_checkpoint({"weights": torch.zeros(1_000_000)}, place)
    assert str(told.value) == (
        f"{place}: checkpoint not written (File too large); the last one is kept: make room and run again"
    )
    assert torch.equal(read(place)["weights"], torch.arange(5))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_cannot_be_written_down_at_all_is_a_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        AtomicCheckpointIO().save_checkpoint({"generator": (i for i in range(3))}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())
