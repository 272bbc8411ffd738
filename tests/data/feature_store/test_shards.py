"""Shards and their manifest: what is written is read, and what is not whole or not what is wanted is refused."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_lab.data.feature_store.manifest import MANIFEST, Contents, Manifest, Shard, shard_file
from eagle3_lab.data.feature_store.shards import Kept, Store, read_shard, write_shard
from eagle3_lab.errors import UserError

LENGTHS = [3, 2, 4]
WANTED = Contents(
    target="tiny",
    weights_hash="w0",
    tokenizer_hash="t0",
    template_hash="c0",
    target_dtype="float32",
    dtype="bfloat16",
    data="d0",
    layers=(1, 4),
    width=8,
    documents=3,
    tokens=9,
)


def states_of(document: int) -> Kept:
    """Numbers of their own for each document, all of them bfloat16's."""
    draw = torch.Generator().manual_seed(document)
    length = LENGTHS[document]
    states = {i: torch.randn(length, 8, generator=draw).bfloat16() for i in WANTED.layers}
    return Kept(states, torch.randint(97, (length,), generator=draw), torch.randn(length, generator=draw))


def write(folder: Path, number: int, manifest: Manifest) -> None:
    some = [states_of(i) for i in list(manifest.spans())[number]]
    states = {i: torch.cat([one.states[i] for one in some]) for i in manifest.contents.layers}
    said = torch.cat([one.argmax for one in some]), torch.cat([one.log_sum for one in some])
    write_shard(folder, number, manifest.contents, [len(one.argmax) for one in some], states, *said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished store of three documents in two shards."""
    manifest = Manifest.plan(WANTED, LENGTHS, 5 * WANTED.token_bytes)
    for number in range(2):
        write(tmp_path, number, manifest)
    manifest.measured(tmp_path).write(tmp_path)
    return tmp_path


def test_documents_fill_shards_in_order_by_hand() -> None:
    assert WANTED.token_bytes == 2 * 8 * 2 + 8
    assert Manifest.plan(WANTED, LENGTHS, 5 * 40).shards == (Shard(2, 5), Shard(1, 4))
    assert Manifest.plan(WANTED, LENGTHS, 5 * 40 - 1).shards == (Shard(1, 3), Shard(1, 2), Shard(1, 4))
    assert list(Manifest.plan(WANTED, LENGTHS, 200).spans()) == [range(2), range(2, 3)]
    assert Manifest.plan(WANTED, LENGTHS, 1).shards[2] == Shard(1, 4), "a document is never divided"


def test_what_is_written_is_read_document_by_document(folder: Path) -> None:
    store = Store(folder, WANTED)
    assert len(store) == 3
    for i in (2, 0, 1, 2):
        kept, told = store.document(i, [4, 1]), states_of(i)
        for layer in (1, 4):
            assert torch.equal(kept.states[layer], told.states[layer])
        assert torch.equal(kept.argmax.long(), told.argmax)
        assert torch.equal(kept.log_sum, told.log_sum)
    assert set(store.document(0, [4]).states) == {4}


def test_the_manifest_reads_back_as_itself_and_is_plain_json(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert manifest.contents == WANTED
    said = json.loads((folder / MANIFEST).read_text())
    assert said["contents"]["layers"] == [1, 4]
    assert [one["bytes"] for one in said["shards"]] == [shard_file(folder, i).stat().st_size for i in (0, 1)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"weights_hash": "w1"}, "holds states of a target with weights hash w0, needed is w1"),
        ({"tokenizer_hash": "t1"}, "holds states of a tokenizer with hash t0, needed is t1"),
        ({"template_hash": "c1"}, "holds states of a chat template with hash c0, needed is c1"),
        ({"target_dtype": "bfloat16"}, "holds states of a target run in float32, needed is bfloat16"),
        ({"dtype": "float16"}, "holds states kept in bfloat16, needed is float16"),
        ({"data": "d1"}, "holds states of data with hash d0, needed is d1"),
        ({"layers": (1, 2, 3, 4)}, "holds hidden states 1, 4, needed is also 2, 3"),
    ],
)
def test_a_store_of_something_else_is_refused_by_what_differs(folder: Path, change: dict, line: str) -> None:
    with pytest.raises(UserError, match=f"features.folder: {folder} {line}; name another folder"):
        Store(folder, replace(WANTED, **change))


def test_a_store_of_more_layers_serves_one_that_needs_fewer(folder: Path) -> None:
    assert Store(folder, replace(WANTED, layers=(4,), target="by another name")).document(0, [4]).states[4].shape == (
        3,
        8,
    )


def test_an_unfinished_store_is_never_read(tmp_path: Path) -> None:
    manifest = Manifest.plan(WANTED, LENGTHS, 5 * WANTED.token_bytes)
    for step in ("nothing", "a plan", "a shard"):
        if step == "a plan":
            manifest.write(tmp_path)
        elif step == "a shard":
            write(tmp_path, 0, manifest)
        with pytest.raises(UserError, match="no finished feature store; `fit` makes it"):
            Store(tmp_path, WANTED)


@pytest.mark.parametrize("size", [0, 100, -1, None])
def test_a_shard_that_is_cut_short_or_gone_is_refused(folder: Path, size: int | None) -> None:
    file = shard_file(folder, 1)
    whole = file.read_bytes()
    if size is None:
        file.unlink()
    else:
        file.write_bytes(whole[:size])
    with pytest.raises(UserError, match=rf"000001.safetensors: has \d+ bytes, {len(whole)} were written; remove "):
        Store(folder, WANTED)


def test_a_changed_byte_is_told_with_the_file_and_the_document(folder: Path) -> None:
    tensors = read_shard(folder, 0, Manifest.plan(WANTED, LENGTHS, 5 * WANTED.token_bytes))
    wrong = tensors["state.4"][3:].view(torch.int16).numpy().tobytes()  # document 1's
    file = shard_file(folder, 0)
    whole = file.read_bytes()
    assert whole.count(wrong) == 1
    file.write_bytes(whole.replace(wrong, bytes([wrong[0] ^ 1]) + wrong[1:]))
    store = Store(folder, WANTED)
    assert torch.equal(store.document(0, [1, 4]).states[4], states_of(0).states[4])
    assert torch.equal(store.document(1, [1]).states[1], states_of(1).states[1])
    with pytest.raises(UserError, match=r"000000.safetensors: state.4 of document 1 is damaged \(checksum\); remove"):
        store.document(1, [4])


def test_a_shard_of_another_store_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, 0, Manifest.plan(replace(WANTED, data="d1"), LENGTHS, 5 * WANTED.token_bytes))
    os.replace(shard_file(other, 0), shard_file(folder, 0))
    with pytest.raises(UserError, match="belongs to another store than its manifest"):
        Store(folder, WANTED).document(0, [4])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"contents": {"format": 1}, "shards": []}'])
def test_a_broken_manifest_costs_one_line(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="is no manifest of a feature store .*; remove the folder"):
        Store(folder, WANTED)


def test_a_later_format_is_refused_by_its_number(folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_text())
    said["contents"] |= {"format": 9, "unheard": "of"}
    (folder / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(UserError, match="is of format 9, this lab reads 1"):
        Store(folder, WANTED)


def test_a_write_that_fails_leaves_neither_a_shard_nor_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 0, Manifest.plan(WANTED, LENGTHS, 5 * WANTED.token_bytes))
    assert list(tmp_path.iterdir()) == []
