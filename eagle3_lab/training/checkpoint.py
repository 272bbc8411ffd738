"""Checkpoints: the draft only, written so that a half-written one is never loaded, and read only if it fits.

A checkpoint holds tensors, numbers and strings, so ``torch.load(weights_only=True)`` reads it. Beside Lightning's
own state it says, under ``eagle3_lab``, which target it was trained for and of which parts it is.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from eagle3_lab.config.reading import show
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import DraftModel, FeatureSource, FrozenTarget
from eagle3_lab.system.files import is_file, is_folder, open_atomic
from eagle3_lab.types import TargetSpec

KEY = "eagle3_lab"
VOCAB = "draft.draft_vocab.d2t"


ADVICE = "lower optimizer.lr, or set trainer.gradient_clip_val"


class NotFinite(UserError):
    """Training came to a loss, a weight or a moment of the optimizer that is NaN or infinite."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the destination, syncs, and renames: a killed or full-disk save leaves the last checkpoint whole.
    What is not finite is never written, and never read.

    (Lightning writes in the system's temporary folder and moves, which on another file system is a plain copy.)

    Raises:
        NotFinite: on writing, a weight or a moment of the optimizer that is NaN or infinite.
        UserError: a disk that is full; on reading, no checkpoint, or such a number.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        place = Path(path)
        if (name := not_finite(checkpoint)) is not None:
            raise NotFinite(
                f"training: {name} is not finite after step {checkpoint.get('global_step')}, and {place} is not "
                f"written; {ADVICE}"
            )
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(place) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # torch's writer fails a second time when it closes a file that could not be written to
            fault = error if isinstance(error, OSError) else error.__context__
            if not isinstance(fault, OSError):
                raise
            raise UserError(
                f"{place}: checkpoint not written ({fault.strerror}); the last one is kept: make room and run again"
            ) from None

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        content = read(Path(path))
        if (name := not_finite(content)) is not None:
            raise UserError(f"{path}: {name} is not finite; remove it, and {ADVICE}")
        return content


def not_finite(checkpoint: Mapping[str, Any]) -> str | None:
    """The name of a weight, or of an optimizer's number, that is NaN or infinite; None where there is none."""
    for key in ("state_dict", "optimizer_states"):
        for name, value in _tensors(checkpoint.get(key), key):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return name.removeprefix("state_dict.")
    return None


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of nested tables and lists, by their path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(one, f"{name}.{key}")


@dataclass(frozen=True)
class Identity:
    """What a draft was trained for, as stored in its checkpoint."""

    hidden: int
    vocab: int
    weights_hash: str
    tokenizer_hash: str
    settings_hash: str = ""  # not in checkpoints of before there was one, and then not compared

    @staticmethod
    def of(spec: TargetSpec) -> Identity:
        return Identity(spec.hidden, spec.vocab, spec.weights_hash, spec.tokenizer_hash, spec.settings_hash)

    def refuse_other(self, spec: TargetSpec, path: Path) -> None:
        """Raises UserError where the target at hand has another width, vocabulary or tokenizer, or other weights or
        settings."""
        other = Identity.of(spec)
        for name, wanted, found in (
            ("hidden size", self.hidden, other.hidden),
            ("vocabulary", self.vocab, other.vocab),
            ("tokenizer hash", self.tokenizer_hash, other.tokenizer_hash),
            ("weights hash", self.weights_hash, other.weights_hash),
            ("config.json hash", self.settings_hash or other.settings_hash, other.settings_hash or self.settings_hash),
        ):
            if wanted != found:
                raise UserError(
                    f"{path}: trained for a target whose {name} is {wanted}, {spec.name} has {found}; "
                    "use the target that the checkpoint was trained for"
                )


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content, tensors on the CPU.

    Raises:
        UserError: no such file, or one that is no checkpoint of this lab.
    """
    _require_file(path)
    try:
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        with zipfile.ZipFile(path) as archive:  # torch reads past a wrong byte
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its part {damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged archive raises whatever its first wrong byte leads to
        said = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: cannot be read as a checkpoint ({said}); give one that `fit` wrote") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, no checkpoint; give one that `fit` wrote")
    return content


def _require_file(path: Path) -> None:
    if is_folder(path):
        raise UserError(f"checkpoint: {path} is a folder; give a file that `fit` wrote")
    if not is_file(path):
        raise UserError(f"checkpoint: no file {path}; train one with `fit`")


def content_hash(path: Path) -> str:
    """Identity of a checkpoint's bytes. Raises UserError where there is no such file."""
    _require_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def usable(path: Path) -> bool:
    """Whether a checkpoint is there and reads whole."""
    try:
        read(path)
    except UserError:
        return False
    return True


def label(target: FrozenTarget, source: FeatureSource, draft: DraftModel) -> dict[str, Any]:
    """What a checkpoint says of itself under KEY."""
    return {
        "target": asdict(Identity.of(target.spec)),
        "parts": _parts(source, draft),
        "options": _options(source, draft),
    }


def _parts(source: FeatureSource, draft: DraftModel) -> str:
    return f"{type(draft).__name__} on {type(source).__name__}"


def _options(source: FeatureSource, draft: DraftModel) -> dict[str, dict[str, object]]:
    """What decides the parts' function beside their weights, by the keys of an experiment."""
    return {"model.features": source.options(), "model.draft": draft.options()}


def restore(
    path: Path, target: FrozenTarget, source: FeatureSource, draft: DraftModel, *, draft_vocab: int | None = None
) -> dict[str, Any]:
    """Build ``source`` and ``draft`` for ``target`` and load their trained weights; returns the checkpoint.

    ``draft_vocab``: how many target ids the experiment's draft can say; None: as many as the checkpoint's.

    Raises:
        UserError: trained for another target, with other parts than these, or with other options of theirs.
    """
    content = read(path)
    trained_for, parts, weights = _told(content, path)
    trained_for.refuse_other(target.spec, path)
    if parts != _parts(source, draft):
        raise UserError(
            f"{path}: holds {parts}, the experiment has {_parts(source, draft)}; use a YAML with the same "
            "model.draft and model.features"
        )
    size, every = len(weights[VOCAB]), (target.spec.vocab, target.spec.real_vocab)
    if draft_vocab not in (None, size) and not (draft_vocab in every and size in every):
        raise _other(path, "model.draft_vocab", size, draft_vocab)
    offsets = weights[VOCAB]
    try:
        draft.build(target, source.build(target), offsets + torch.arange(len(offsets)))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    _refuse_other_options(path, content[KEY].get("options"), _options(source, draft))
    for name, part in (("source", source), ("draft", draft)):
        prefix = f"{name}."
        state = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        try:
            part.load_state_dict(state)
        except (RuntimeError, ValueError) as error:  # other shapes; a vocabulary's two maps that disagree
            why = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path}: does not fit {type(part).__name__} ({why}); use the YAML it was trained with"
            ) from None
    return content


def _refuse_other_options(path: Path, trained: object, built: Mapping[str, Mapping[str, object]]) -> None:
    """Raises UserError where parts were built with another option than those of the checkpoint. One that was written
    before options were recorded says nothing of them, and neither does it of an option that is newer than it."""
    for key, options in built.items():
        known = trained.get(key) if isinstance(trained, dict) else None
        for name, value in options.items():
            if isinstance(known, dict) and name in known and not _equal(known[name], value):
                raise _other(path, f"{key}.{name}", known[name], value)


def _equal(a: object, b: object) -> bool:
    """Whether two options are the same; numbers but for the rounding of another machine."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-4)
    return a == b


def _other(path: Path, key: str, trained: object, built: object) -> UserError:
    return UserError(
        f"{path}: was trained with {key} {show(trained)}, the experiment has {show(built)}; write what it was trained "
        "with, or train another head"
    )


def _told(content: dict[str, Any], path: Path) -> tuple[Identity, str, dict[str, Tensor]]:
    """What a checkpoint was trained for, its parts and its weights. Raises UserError where it says no such thing."""
    said, weights = content.get(KEY), content.get("state_dict")
    target = said.get("target") if isinstance(said, dict) else None
    parts = said.get("parts") if isinstance(said, dict) else None
    if not _is_identity(target) or not isinstance(parts, str) or not _are_weights(weights):
        raise UserError(f"{path}: not a checkpoint of eagle3_lab; train one with `fit`")
    if (name := not_finite(content)) is not None:
        raise UserError(f"{path}: {name} holds NaN or infinity; train another head, with a lower optimizer.lr")
    known = {field.name: target[field.name] for field in fields(Identity) if field.name in target}
    return Identity(**known), parts, weights


def _is_identity(said: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(said, dict):
        return False
    return all(type(said.get(field.name, field.default)).__name__ == field.type for field in fields(Identity))


def _are_weights(found: object) -> TypeGuard[dict[str, Tensor]]:
    """Named tensors, the draft vocabulary's map among them."""
    if not isinstance(found, dict):
        return False
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()):
        return False
    return VOCAB in found and found[VOCAB].ndim == 1 and found[VOCAB].dtype == torch.int64
