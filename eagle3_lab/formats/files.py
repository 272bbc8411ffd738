"""The files of a head outside our parts: a folder or a repository of the hub, with ``config.json`` and tensors.

Nothing of them is executed. A pickled file (``.bin``, ``.pt``) is read only where the place names it, whole and at most
`LARGEST` bytes, as tensors alone.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lab.errors import UserError
from eagle3_lab.system.files import is_folder, local_path

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MEDUSA = "medusa_lm_head"
TENSORS = (WEIGHTS, f"{MEDUSA}.safetensors")
PICKLED = (".bin", ".pt")
LARGEST = 16 * 2**30
"""Bytes of a pickled file, also of what it unpacks to."""


@dataclass(frozen=True)
class HeadFiles:
    """Where a head's configuration and tensors lie on this machine. ``place`` is as the user wrote it."""

    place: str
    config: Path
    tensors: tuple[Path, ...]

    def read_config(self) -> dict[str, Any]:
        """Return the configuration. Raises UserError where it is no JSON object."""
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.config}: cannot be read ({error}); a JSON object is needed") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config}: holds a {type(config).__name__}; a JSON object is needed")
        return config

    def read_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the files, on the CPU.

        Raises:
            UserError: a file that is damaged, too large, or holds anything but tensors, or a number that is not finite.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.tensors:
            tensors |= _read(file)
        for name, value in tensors.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise UserError(f"{self.place}: {name} holds NaN or infinity; the file is damaged")
        return tensors

    def content_hash(self) -> str:
        """Return the identity of a head: of its configuration and its tensors."""
        digest = hashlib.sha256(self.config.read_bytes()).hexdigest()[:16]
        for path in self.tensors:
            with path.open("rb") as file:
                digest += hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return digest


def find_files(place: str) -> HeadFiles:
    """Return a head's files, fetched first for a hub id.

    ``place`` is a folder, a hub id, or either with the name of a file of tensors behind it, which is how a pickled one
    is asked for: ``yuhuili/EAGLE3-LLaMA3.1-Instruct-8B/pytorch_model.bin``.

    Raises:
        UserError: no such folder or hub id, no configuration, no tensors, or pickled ones that ``place`` does not name.
    """
    folder, name = _split(place)
    if name is not None:
        return HeadFiles(place, _fetch(folder, CONFIG), (_fetch(folder, name),))
    config = _fetch(folder, CONFIG)
    faults: list[UserError] = []
    for name in TENSORS:
        try:
            return HeadFiles(place, config, (_fetch(folder, name),))
        except UserError as error:
            faults.append(error)
    if (index := _optional(folder, INDEX)) is not None:
        return HeadFiles(place, config, tuple(_fetch(folder, name) for name in _shards(index)))
    for name in ("pytorch_model.bin", f"{MEDUSA}.pt"):
        if (pickled := _optional(folder, name, head=True)) is not None:
            raise UserError(f"{folder}: has no {WEIGHTS}, and {pickled.name} is read on request only: {folder}/{name}")
    raise UserError(f"{faults[0]}; {' or '.join(TENSORS)} is needed")


def _split(place: str) -> tuple[str, str | None]:
    """Split a place into folder or hub id, and the name of a file of tensors."""
    before, slash, name = place.rpartition("/")
    if slash and name.endswith((*PICKLED, ".safetensors")):
        return before, name
    return place, None


def _fetch(place: str, name: str) -> Path:
    """Return a file of a head's folder, or of the hub's repository of that id."""
    folder = local_path(place)
    if is_folder(folder) or folder.is_absolute() or place.startswith((".", "~")):
        if not (folder / name).is_file():
            raise UserError(f"no file {folder / name}")
        return folder / name
    try:
        return Path(huggingface_hub.hf_hub_download(place, name))
    except (OSError, ValueError, HfHubHTTPError) as error:
        message = " ".join(str(error).split())[:160]
        raise UserError(f"no folder {place}, and the hub gives no {name} of that id ({message})") from None


def _optional(place: str, name: str, head: bool = False) -> Path | None:
    """Return a file where there is one. ``head``: of the hub, its name alone, nothing is fetched."""
    if head and not is_folder(local_path(place)):
        try:
            return Path(name) if huggingface_hub.file_exists(place, name) else None
        except (OSError, ValueError, HfHubHTTPError):
            return None
    try:
        return _fetch(place, name)
    except UserError:
        return None


def _shards(index: Path) -> Sequence[str]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: cannot be read ({error}); a weight_map is needed") from None
    if not all(isinstance(name, str) and "/" not in name and name.endswith(".safetensors") for name in names):
        raise UserError(f"{index}: names {names}; safetensors files beside it are needed")
    return names


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        _require_size(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())[:120]})") from None
    except Exception as error:  # noqa: BLE001 - a damaged archive raises whatever its first wrong byte leads to
        message = " ".join(str(error).split())[:120]
        raise UserError(f"{file}: cannot be read as a file of tensors alone ({message})") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{file}: holds a {type(content).__name__}; a mapping from names to tensors is needed")
    return dict(content)


def _require_size(file: Path) -> None:
    """Refuse a pickled file that is larger than any head, packed or unpacked."""
    size = file.stat().st_size
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = max(size, sum(part.file_size for part in archive.infolist()))
    if size > LARGEST:
        raise UserError(f"{file}: {size / 2**30:.1f} GiB; at most {LARGEST / 2**30:.0f} GiB of a pickled file are read")
