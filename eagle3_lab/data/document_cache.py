"""Encoded documents kept on disk by content, so that only the first run over a text renders and tokenises it.

One safetensors file a key, written whole or not at all and checked when it is read: a damaged one is made anew. The key
is of everything that decides the documents, the code that makes them among it, so nothing stale is ever found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_lab.data import chat, conversations, documents, held_out, overlap, parts, records, repetition, turns
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.documents import Document, documents_hash
from eagle3_lab.data.parts import Parts
from eagle3_lab.system.progress import stage

FEWEST = 200  # conversations: fewer are encoded within a fraction of a second, and no file is made of them

_RULES = (chat, conversations, documents, held_out, repetition, overlap, parts, records, turns)
_log = logging.getLogger(__name__)


class DocumentCache:
    """A folder of encoded documents, one file for each text, tokenizer, template and rule.

    Args:
        folder: where the files lie; made when the first is written.
        writes: whether what is missing is written; False: files are only read.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes

    def parts(self, decides: Mapping[str, object], read: Sequence[Conversation], make: Callable[..., Parts]) -> Parts:
        """The documents of the conversations ``read``: out of the file, or made and written.

        Args:
            decides: as JSON, whatever of the files and options decides them.
            read: all conversations of the files, in their order.
            make: makes them, and tells its ``on_done`` how many conversations are done with.
        """
        if len(read) < FEWEST:
            return make()
        place = self.folder / f"{_key(decides)}.safetensors"
        with stage("documents", "conversations", len(read)) as s:
            if (found := _read(place, read)) is not None:
                s.reused()
                return found
            made = make(on_done=s.advance)
            if self.writes and made.train:
                _write(place, made, read)
            return made


def _key(decides: Mapping[str, object]) -> str:
    versions = [version(name) for name in ("transformers", "tokenizers")]
    said = {"decides": dict(decides), "versions": versions, "rules": _rules()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _rules() -> str:
    """Identity of the code that makes documents of a file."""
    digest = hashlib.sha256()
    for module in _RULES:
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


def _read(place: Path, read: Sequence[Conversation]) -> Parts | None:
    """What the file holds; None where there is none, or a damaged one, which is said."""
    if not place.is_file():
        return None
    try:
        with safe_open(str(place), "pt") as opened:
            said = json.loads((opened.metadata() or {})["said"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        found = _parts(tensors, said, read)
        if _check(found, tensors) == said["check"]:
            return found
        fault = "checksum"
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        fault = " ".join(str(error).split())
    _log.warning("%s: damaged (%s); its documents are made anew", place, fault)
    return None


def _parts(tensors: Mapping[str, Tensor], said: Mapping[str, Any], read: Sequence[Conversation]) -> Parts:
    lengths = tensors["lengths"].tolist()
    texts = zip(tensors["ids"].split(lengths), tensors["supervised"].split(lengths), strict=True)
    owners = tensors["conversation"].tolist()
    found = [Document(read[i], ids, mine) for i, (ids, mine) in zip(owners, texts, strict=True)]
    first, second = map(Report.of, said["reports"])
    train, held_out = found[: said["train"]], found[said["train"] :]
    return Parts(train, held_out, (first, second), documents_hash(found), tensors["counts"])


def _write(place: Path, made: Parts, read: Sequence[Conversation]) -> None:
    """Beside the place, synced, renamed. A disk that takes no file costs the next run's time and not this run."""
    number = {id(one): i for i, one in enumerate(read)}
    found = [*made.train, *made.held_out]
    tensors = {
        "ids": torch.cat([one.ids for one in found]),
        "supervised": torch.cat([one.supervised for one in found]),
        "lengths": torch.tensor([len(one) for one in found]),
        "conversation": torch.tensor([number[id(one.conversation)] for one in found]),
        "counts": made.counts,
    }
    said = {"train": len(made.train), "reports": [report.counts() for report in made.reports]}
    metadata = {"said": json.dumps(said | {"check": _check(made, tensors)})}  # one key: of several the order may change
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, temporary, metadata=metadata)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, place)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        _log.warning("%s: cannot be written (%s); the next run makes its documents anew", place, error)


def _check(made: Parts, tensors: Mapping[str, Tensor]) -> str:
    """Of all that the file holds: tokens and masks by their hash, the rest as it is."""
    reports = json.dumps([report.counts() for report in made.reports])
    digest = hashlib.sha256(f"{made.hash} {len(made.train)} {reports}".encode())
    for name in ("conversation", "counts"):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
