"""Public EAGLE-3 heads, in the layout of SafeAILab/EAGLE, SpecForge and SGLang: read into our parts, and written back.

A head is a folder, or a hub id, with ``config.json`` (flat fields of a Llama configuration) and ``model.safetensors``
or ``pytorch_model.bin``. Its tensors are ours but for two names: ``midlayer.`` is our ``layers.0.``, and ``fc.weight``
is the feature source's. ``d2t`` holds offsets; a head without it says every target id.

The experiment says which parts a head is read into. Where the head's configuration disagrees with them, the one line
that says so names the key to change: nothing of a head is guessed, and no tensor of it is dropped unseen.

Source: EAGLE cb7e084 eagle/model/cnets.py:488-534, eagle/model/ea_model.py:51-76, 124-135; SGLang llama_eagle3.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.errors import UserError
from eagle3_lab.formats.agreement import refuse_disagreement
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.system.files import local_path
from eagle3_lab.target_model.hf_target import HFTarget

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
EMBEDDING, FUSION = "embed_tokens.weight", "fc.weight"
THERE, HERE = "midlayer.", "layers.0."
"""How the first layer is called by them, and by us."""

DERIVED = "rotary_emb.inv_freq"
"""Ends the name of a buffer that old heads carry, and that their configuration decides."""


@dataclass(frozen=True)
class PublicHead:
    """A head as its files hold it. ``place`` names it in messages; ``tensors`` are by public names, on the CPU."""

    place: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read(place: str) -> PublicHead:
    """Read a head's files, nothing of which is executed.

    Raises:
        UserError: no such folder or hub id, a missing or broken file, or a speculators checkpoint.
    """
    file = _file(place, CONFIG)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); a JSON object is needed") from None
    if not isinstance(config, dict) or "speculators_model_type" in config:
        raise UserError(
            f"{file}: no configuration of an EAGLE-3 head in the layout of EAGLE, SpecForge or SGLang (flat fields, "
            "draft_vocab_size among them); convert it first"
        )
    tensors = _tensors(weights_file(place))
    for name, value in tensors.items():
        if name not in ("d2t", "t2d") and not value.is_floating_point():
            raise UserError(f"{place}: {name} is of {value.dtype}; a floating point tensor is needed")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise UserError(f"{place}: {name} holds NaN or infinity; the file is damaged")
    return PublicHead(place, config, tensors)


def weights_file(place: str) -> Path:
    """The file of a head's tensors, fetched first for a hub id. Raises UserError where there is none."""
    faults = []
    for name in WEIGHTS:
        try:
            return _file(place, name)
        except UserError as error:
            faults.append(error)
    raise UserError(f"{faults[0]}; {' or '.join(WEIGHTS)} is needed") from None


def content_hash(place: str) -> str:
    """Identity of a head: of its configuration and its tensors."""
    digest = hashlib.sha256(_file(place, CONFIG).read_bytes())
    with weights_file(place).open("rb") as file:
        return digest.hexdigest()[:16] + hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load(head: PublicHead, target: HFTarget, source: FeatureSource, draft: DraftModel) -> None:
    """Build ``source`` and ``draft`` for ``target`` and give them the head's weights, in their own dtype.

    Raises:
        UserError: other parts than EAGLE-3's, a head for another target or of other sizes than the parts', a
            vocabulary that is none, or a tensor that is missing, unknown or of another shape.
    """
    if not isinstance(source, FusedFeature) or not isinstance(draft, Eagle3):
        raise UserError(
            f"model.public: {head.place} is Eagle3 on FusedFeature, the experiment has {type(draft).__name__} on "
            f"{type(source).__name__}; set model.draft: Eagle3 and model.features: FusedFeature"
        )
    if source.normed or draft.feedback != "pre_norm":
        raise UserError(f"model.public: {head.place} is read as EAGLE-3; features.normed and draft.feedback are 3.1's")
    try:
        _load(head, target, source, draft)
    except (TypeError, IndexError, KeyError, AttributeError) as error:  # a public file may hold anything
        raise UserError(
            f"{head.place}: a field of {CONFIG} or a tensor is of another kind than an EAGLE-3 head's "
            f"({type(error).__name__}: {error})"
        ) from None


def _load(head: PublicHead, target: HFTarget, source: FusedFeature, draft: Eagle3) -> None:
    try:
        draft.build(target, source.build(target), _vocabulary(head, target.spec.vocab))
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    refuse_disagreement(head.place, head.config, target, source, draft)
    ours = _ours(head, target, draft)
    source.load_state_dict({FUSION: _fitting(head, ours, FUSION, source.fc.weight)})
    kept = {name: value for name, value in draft.state_dict().items() if not name.startswith("draft_vocab.")}
    state = {name: _fitting(head, ours, name, value) for name, value in kept.items()}
    if ours:
        raise UserError(f"{head.place}: tensors that no EAGLE-3 head has: {', '.join(sorted(ours)[:5])}")
    state |= {f"draft_vocab.{name}": value for name, value in draft.draft_vocab.state_dict().items()}
    draft.load_state_dict(state)


def _file(place: str, name: str) -> Path:
    """A file of a head's folder, or of the hub's repository of that id."""
    folder = local_path(place)
    if folder.is_dir() or folder.is_absolute() or place.startswith((".", "~")):
        if not (folder / name).is_file():
            raise UserError(f"model.public: no file {folder / name}")
        return folder / name
    try:
        return Path(huggingface_hub.hf_hub_download(place, name))
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = " ".join(str(error).split())[:160]
        raise UserError(f"model.public: no folder {place}, and the hub gives no {name} of that id ({said})") from None


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())[:120]})") from None
    except Exception as error:  # noqa: BLE001 - a damaged archive raises whatever its first wrong byte leads to
        said = " ".join(str(error).split())[:120]
        raise UserError(f"{file}: cannot be read as a file of tensors alone ({said})") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file}: holds a {type(found).__name__}; a mapping from names to tensors is needed")
    return dict(found)


def _vocabulary(head: PublicHead, vocab: int) -> Tensor:
    """Return the kept target ids, ascending.

    Raises:
        UserError: a map that is none, of another length than the head's rows, or missing for a reduced vocabulary.
    """
    rows = head.tensors["lm_head.weight"].shape[0] if "lm_head.weight" in head.tensors else 0
    d2t, t2d = head.tensors.get("d2t"), head.tensors.get("t2d")
    size = head.config.get("draft_vocab_size")
    try:
        if size not in (None, rows):
            raise ValueError(f"{CONFIG} says draft_vocab_size {size}, and lm_head has {rows} rows")
        return _kept(d2t, t2d, rows, vocab)
    except ValueError as error:
        raise UserError(f"{head.place}: {error}") from None


def _kept(d2t: Tensor | None, t2d: Tensor | None, rows: int, vocab: int) -> Tensor:
    """Return the target ids of a head's rows. Raises ValueError where the maps do not tell them."""
    if d2t is None:
        if rows != vocab:
            raise ValueError(f"no d2t, though its lm_head has {rows} rows and the target {vocab} ids")
        if t2d is not None and not (t2d.shape == (vocab,) and bool(t2d.all())):
            raise ValueError(f"no d2t, and a t2d that does not mark each of the target's {vocab} ids")
        return torch.arange(vocab)
    if d2t.dtype not in (torch.int32, torch.int64) or d2t.shape != (rows,):
        raise ValueError(f"d2t is {list(d2t.shape)} of {d2t.dtype}; [{rows}] whole numbers, one a row of lm_head, fit")
    if t2d is not None and t2d.dtype != torch.bool:
        raise ValueError(f"t2d is of {t2d.dtype}; torch.bool is needed")
    absolute = rows > 1 and 0 <= int(d2t[0]) and int(d2t[-1]) < vocab and bool((d2t[1:] > d2t[:-1]).all())
    if t2d is None and absolute:  # as offsets: no two neighbouring ids kept
        raise ValueError("d2t rises at each row and there is no t2d: its numbers may be target ids or offsets; add t2d")
    return DraftVocab.from_offsets(d2t, vocab, t2d).ids()


def _ours(head: PublicHead, target: HFTarget, draft: Eagle3) -> dict[str, Tensor]:
    """The head's tensors by our names, those left out that our parts have from elsewhere."""
    found = {
        name.replace(THERE, HERE): value
        for name, value in head.tensors.items()
        if name not in ("d2t", "t2d") and not name.endswith(DERIVED)
    }
    embedding = found.pop(EMBEDDING, None)
    if draft.embedding == "own" and embedding is not None:
        found["embed.tokens.weight"] = embedding
    elif embedding is not None and not _is_targets(embedding, target):
        raise UserError(f"{head.place}: holds an embedding of its own; set model.draft.embedding: own")
    return found


def _is_targets(embedding: Tensor, target: HFTarget, rows: int = 8192) -> bool:
    """Return whether a stored table is the target's own, bit for bit in the narrower of the two dtypes."""
    if embedding.shape != (target.spec.vocab, target.spec.hidden):
        return False
    for begin in range(0, len(embedding), rows):
        part = embedding[begin : begin + rows]
        mine = target.embed(torch.arange(begin, begin + len(part), device=target.device)).cpu()
        if not torch.equal(mine.to(part.dtype), part) and not torch.equal(part.to(mine.dtype), mine):
            return False
    return True


def _fitting(head: PublicHead, tensors: dict[str, Tensor], name: str, wanted: Tensor) -> Tensor:
    """Take one tensor out, refusing another shape."""
    public = name.replace(HERE, THERE).replace("embed.tokens.", "embed_tokens.")
    if name not in tensors:
        raise UserError(f"{head.place}: no tensor {public}")
    found = tensors.pop(name)
    if found.shape != wanted.shape:
        raise UserError(f"{head.place}: {public} is {list(found.shape)}, {list(wanted.shape)} fits the experiment")
    return found


def public_tensors(source: FusedFeature, draft: Eagle3, dtype: torch.dtype | None = None) -> Mapping[str, Tensor]:
    """Built parts as a public head's tensors, on the CPU, in ``dtype`` (None: their own)."""
    named = {FUSION: source.fc.weight}
    named |= {
        name.replace(HERE, THERE): value
        for name, value in draft.state_dict().items()
        if not name.startswith(("draft_vocab.", "embed."))
    }
    if (table := draft.embed.table()) is not None:
        named[EMBEDDING] = table
    floats = {name: value.detach().to("cpu", dtype or value.dtype).contiguous() for name, value in named.items()}
    if len(draft.vocab) == draft.draft_vocab.t2d.shape[0]:  # vLLM has no place for the map of a full vocabulary
        return floats
    return floats | {name: value.cpu().contiguous() for name, value in draft.draft_vocab.state_dict().items()}
