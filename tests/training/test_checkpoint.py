"""Checkpoints on the disk: whole or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most

from eagle3_lab.errors import UserError
from eagle3_lab.training.checkpoint import AtomicCheckpointIO, NotFinite, read


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


@pytest.mark.parametrize("key", ["state_dict", "optimizer_states"])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_not_written(tmp_path: Path, key: str, wrong: float) -> None:
    io, place = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    content = {key: [{"state": {3: {"exp_avg": torch.tensor([1.0, 2.0])}}}], "global_step": 4}
    io.save_checkpoint(content, place)
    before = place.read_bytes()
    content[key][0]["state"][3]["exp_avg"][1] = wrong
    with pytest.raises(
        NotFinite, match=r"0\.state\.3\.exp_avg is not finite after step 4, and .* is not written; lower"
    ):
        io.save_checkpoint(content, place)
    assert place.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_who_may_read_a_checkpoint_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "last.ckpt").stat().st_mode) == mode


def test_what_cannot_be_written_down_at_all_is_a_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        AtomicCheckpointIO().save_checkpoint({"generator": (i for i in range(3))}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())
