"""A feature store made of a tiny target: equal to its forward, made once, and gone on with after a kill."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from making import LENGTHS, NEEDS, documents, making, target

import eagle3_lab
from eagle3_lab.data.feature_store.features import Features, Making
from eagle3_lab.data.feature_store.manifest import shard_file
from eagle3_lab.data.feature_store.rows import FromStore, KeptBatch, KeptRows, Reading
from eagle3_lab.data.feature_store.shards import Store
from eagle3_lab.data.packing import PackedRows, RowLoader, RowOrder, read_ahead
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Batch, Needs

ROWS = [(0, 1), (2,), (), (3, 4, 5)]


@pytest.fixture(scope="module")
def model() -> HFTarget:
    return target()


@pytest.fixture
def forwards(model: HFTarget) -> Iterator[list[int]]:
    """Grows by one at each forward of the target's body."""
    seen: list[int] = []
    handle = model.model.base_model.register_forward_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


def made(folder: Path, model: HFTarget, dtype: str = "float32") -> Store:
    doing = making(folder, model, dtype, shard_bytes=8000)
    doing.make(model, 16, 2)
    return Store(folder, doing.wanted)


def batch_of(store: Store, needs: Needs = NEEDS) -> KeptBatch:
    return KeptRows(PackedRows(documents(), 24), Reading(store, needs), 0)[ROWS]


# ---- equal to the target's forward


def test_float32_states_are_the_targets_own_in_any_packing(tmp_path: Path, model: HFTarget) -> None:
    batch = batch_of(made(tmp_path, model))
    told, real = model.features(batch, NEEDS), batch.document >= 0
    out = FromStore(torch.float32)(batch, NEEDS)
    for found, wanted in zip((*out.taps, out.top), (*told.taps, told.top), strict=True):
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)
        assert not found[~real].any()
    logits = model.logits(told.top)[real]
    assert torch.equal(out.summary.argmax[real], logits.argmax(-1))
    torch.testing.assert_close(out.summary.log_sum[real], logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_narrow_states_are_rounded_and_their_law_adds_up_to_one(
    tmp_path: Path, model: HFTarget, dtype: str, step: float
) -> None:
    batch = batch_of(made(tmp_path, model, dtype))
    assert batch.out.top.dtype == getattr(torch, dtype)
    told, real = model.features(batch, NEEDS), batch.document >= 0
    out = FromStore(torch.float32)(batch, NEEDS)
    for found, wanted in zip((*out.taps, out.top), (*told.taps, told.top), strict=True):
        torch.testing.assert_close(found[real], wanted[real], rtol=step, atol=1e-5)
    assert torch.equal(out.summary.argmax[real], model.logits(told.top)[real].argmax(-1)), "the target's, not rounded"
    law = (model.logits(out.top)[real] - out.summary.log_sum[real][:, None]).exp()
    torch.testing.assert_close(law.sum(-1), torch.ones(len(law)), rtol=0, atol=1e-5)


def test_only_the_layers_that_are_needed_are_read(tmp_path: Path, model: HFTarget) -> None:
    store = made(tmp_path, model)
    full, top = batch_of(store), batch_of(store, Needs(layers=(4,), top=True))
    assert torch.equal(top.out.taps[0], full.out.top)
    assert batch_of(store, Needs(layers=(2,), top=True)).out.taps[0].equal(full.out.taps[1])


def test_a_state_that_float16_cannot_hold_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = target()
    loud.model.get_input_embeddings().weight.data[5] = 1e5
    doing = making(tmp_path, loud, "float16")
    doing._found[0].ids[0] = 5
    with pytest.raises(UserError, match="features.dtype: float16 cannot hold hidden state 1 .* bfloat16 can"):
        doing.make(loud, 16, 2)


# ---- the order of the data


@pytest.mark.parametrize("threads", [1, 2])
def test_reading_ahead_changes_neither_order_nor_a_bit(tmp_path: Path, model: HFTarget, threads: int) -> None:
    store, rows = made(tmp_path, model, "bfloat16"), PackedRows(documents(), 16)
    order = RowOrder(LENGTHS, 16, seed=3)
    plain, kept = RowLoader(rows, order), KeptRows(rows, Reading(store, NEEDS), 0)
    alone, ahead = RowLoader(kept, order), RowLoader(kept, order, threads=threads)
    for _ in range(2):  # epochs, each packed anew
        for a, b, c in zip(plain, alone, ahead, strict=True):
            assert torch.equal(a.ids, b.ids) and torch.equal(b.ids, c.ids) and torch.equal(a.document, c.document)
            assert all(torch.equal(x, y) for x, y in zip(b.out.taps, c.out.taps, strict=True))
            assert torch.equal(b.out.summary.argmax, c.out.summary.argmax)
        assert alone.state_dict() == ahead.state_dict() == plain.state_dict()


def test_reading_ahead_stays_ahead_by_its_threads_and_ends_when_left() -> None:
    asked: list[int] = []
    found = read_ahead(lambda key: asked.append(key) or key, range(100), 2)
    assert [next(found), next(found)] == [0, 1]
    found.close()
    assert set(asked) <= set(range(4)), "two taken, and at most two more"
    with pytest.raises(ZeroDivisionError):
        list(read_ahead(lambda key: 1 // key, [1, 0, 1], 2))


def test_a_batch_goes_to_a_device_with_its_features(tmp_path: Path, model: HFTarget) -> None:
    moved = batch_of(made(tmp_path, model)).to("meta")
    assert isinstance(moved, KeptBatch) and isinstance(moved, Batch)
    out = moved.out
    for tensor in (moved.ids, *out.taps, out.top, out.summary.argmax, out.summary.log_sum):
        assert tensor.device.type == "meta"


# ---- made once


def test_what_is_finished_is_not_made_again(tmp_path: Path, model: HFTarget, forwards: list[int]) -> None:
    made(tmp_path, model)
    assert forwards
    forwards.clear()
    again = making(tmp_path, model, shard_bytes=1)
    assert again.finished and again.tokens_left() == 0
    again.make(model, 16, 2)
    assert not forwards


def test_what_is_missing_alone_is_made(tmp_path: Path, model: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def full(handle: int, fsync: object = os.fsync) -> None:
        if shard_file(tmp_path, 2).is_file():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = "features cannot be written .No space left on device.; finished shards are kept: make room"
        with pytest.raises(UserError, match=line):
            making(tmp_path, model).make(model, 16, 2)
    (tmp_path / ".000003.safetensors-1").write_bytes(b"what a kill left")
    doing = making(tmp_path, model)
    assert doing.tokens_left() == sum(LENGTHS[3:])
    doing.make(model, 16, 2, on_tokens=told.append)
    assert told == LENGTHS[3:], "a document a shard"
    assert not list(tmp_path.glob(".*.safetensors-*"))
    assert len(Store(tmp_path, doing.wanted)) == len(LENGTHS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the program that is killed: a product's last bits depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_making_that_is_killed_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path, model: HFTarget) -> None:
    folder = tmp_path / "killed"
    program = Path(__file__).with_name("making.py")
    paths = [Path(eagle3_lab.__file__).parents[1], program.parents[2]]
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 300
    while not shard_file(folder, 1).is_file():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    with pytest.raises(UserError, match="no finished feature store"):
        Store(folder, making(folder, model).wanted)
    left = making(folder, model).tokens_left()
    assert 0 < left < sum(LENGTHS)
    told: list[int] = []
    making(folder, model).make(model, 16, 2, on_tokens=told.append)
    assert sum(told) == left
    making(tmp_path / "straight", model).make(model, 16, 2)
    for number in range(len(LENGTHS)):
        assert shard_file(folder, number).read_bytes() == shard_file(tmp_path / "straight", number).read_bytes()


def test_another_process_that_makes_the_same_store_is_waited_for(
    tmp_path: Path, model: HFTarget, forwards: list[int]
) -> None:
    waiting = making(tmp_path, model)
    with FileLock(tmp_path / ".lock"):
        thread = threading.Thread(target=waiting.make, args=(model, 16, 2))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not forwards
        made(tmp_path.with_name("elsewhere"), model)
        for file in tmp_path.with_name("elsewhere").glob("*.*"):
            shutil.copy(file, tmp_path)
        forwards.clear()
    thread.join(60)
    assert waiting.finished and not forwards


# ---- where it lies


def test_a_store_of_more_layers_is_found_by_one_that_needs_fewer(tmp_path: Path, model: HFTarget) -> None:
    found = documents()
    top, fused = Needs(layers=(4,), top=True), NEEDS
    features, wide = Features(dtype="float32"), Features(dtype="float32", layers=[0])
    first = features.contents(model, top, found, "d0")
    assert features.place(first, tmp_path).name == f"{first.key}-4"
    for needs, kept in ((fused, features), (fused, wide)):
        contents = kept.contents(model, needs, found, "d0")
        Making(kept.place(contents, tmp_path), contents, found).make(model, 16, 2)
    assert features.place(first, tmp_path).name == f"{first.key}-1-2-4", "the smallest that serves"
    assert wide.place(wide.contents(model, top, found, "d0"), tmp_path).name == f"{first.key}-0-1-2-4"
    other = features.contents(model, top, found, "d1")
    assert features.place(other, tmp_path) == tmp_path / f"{other.key}-4", "of other data, a new one"


def test_a_named_folder_of_something_else_is_refused(tmp_path: Path, model: HFTarget) -> None:
    made(tmp_path, model)
    with pytest.raises(UserError, match="holds hidden states 1, 2, 4, needed is also 0, 3"):
        making(tmp_path, model, layers=[0, 3])
    with pytest.raises(UserError, match="holds states kept in float32, needed is bfloat16"):
        making(tmp_path, model, "bfloat16")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        UserError,
        match=r"has safetensors files, but manifest\.json is missing there, .*; put it back, or name another folder",
    ):
        making(tmp_path, model)


def test_a_disk_too_small_is_told_before_the_first_byte(
    tmp_path: Path, model: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    doing = making(tmp_path / "not" / "yet", model)
    needed = doing.manifest.contents.bytes
    assert needed == sum(LENGTHS) * (3 * 32 * 4 + 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed - 1))
    line = "17.2 kB free, 17.2 kB needed for features of 44 tokens; free some, or set features.folder to another disk"
    with pytest.raises(UserError, match=line):
        doing.make(model, 16, 2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed))
    doing.make(model, 16, 2)
    assert doing.finished


def test_wrong_options_are_named(model: HFTarget) -> None:
    with pytest.raises(ValueError, match=r"features.layers must be ids >= 0, got \[-1\]"):
        Features(layers=[-1])
    with pytest.raises(ValueError, match=r"features.threads must be within 0 \.\. 64, got -1"):
        Features(threads=-1)
    with pytest.raises(UserError, match=r"features.layers: 5, but llama has hidden states 0..4"):
        Features(layers=[5]).contents(model, NEEDS, documents(), "d0")
