"""Heads read from any format into our parts, whole or not at all: no field is guessed and no tensor is dropped unseen.

:func:`load` reads into an experiment's parts: where the head's configuration disagrees with them, the one line that
says so names the key to change. :func:`parts_for` makes parts that a head fits, where no experiment has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.errors import UserError
from eagle3_lab.formats import official, speculators
from eagle3_lab.formats.agreement import refuse_eagle, refuse_eagle3, refuse_medusa
from eagle3_lab.formats.description import EMBEDDING, MAPS, HeadDescription, same_rotary
from eagle3_lab.formats.files import find_files
from eagle3_lab.formats.layer_ids import default_layers, layers_of
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.rope import rope_parameters

READERS = (speculators.read, official.read_medusa, official.read)
"""Asked in this order; the first that knows the contents reads them."""

NEEDED = {"EAGLE-3": (Eagle3, FusedFeature), "EAGLE": (Eagle1, TopFeature), "Medusa": (Medusa, TopFeature)}
LISTED = 5
"""How many names a message lists."""


def read(place: str) -> HeadDescription:
    """Return the head in a folder or a repository of the hub, in whatever format it is by its contents.

    Raises:
        UserError: what `find_files` refuses, files that cannot be read, or contents of no known format.
    """
    files = find_files(place)
    config, tensors = files.read_config(), files.read_tensors()
    for name, value in tensors.items():
        if name not in MAPS and not value.is_floating_point():
            raise UserError(f"{place}: {name} is of {value.dtype}; a floating point tensor is needed")
    try:
        for reader in READERS:
            if (head := reader(place, config, tensors)) is not None:
                return head
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # a public file may hold anything
        raise UserError(f"{place}: {error}") from None
    names = ", ".join(sorted(tensors)[:LISTED])
    raise UserError(
        f"{place}: no draft head by its tensors ({names}); EAGLE-3, EAGLE, HASS or Medusa in the layout of its "
        "authors, SGLang, vLLM or speculators is needed"
    )


def content_hash(place: str) -> str:
    """Return the identity of a head: of its configuration and its tensors. Raises UserError as `find_files`."""
    return find_files(place).content_hash()


def load(head: HeadDescription, target: HFTarget, source: FeatureSource, draft: DraftModel) -> None:
    """Build ``source`` and ``draft`` for ``target`` and give them the head's weights, in the parts' dtype.

    Raises:
        UserError: other parts than the head's, a head for another target or of other sizes than the parts', a
            vocabulary that is none, or tensors that are missing, unexpected or of another shape.
    """
    wanted_draft, wanted_source = NEEDED[head.kind]
    if not isinstance(source, wanted_source) or not isinstance(draft, wanted_draft):
        raise UserError(
            f"{head.place}: is {wanted_draft.__name__} on {wanted_source.__name__}, the experiment has "
            f"{type(draft).__name__} on {type(source).__name__}; set model.draft: {wanted_draft.__name__} and "
            f"model.features: {wanted_source.__name__}"
        )
    try:
        if isinstance(draft, Eagle3) and isinstance(source, FusedFeature):
            _load_eagle3(head, target, source, draft)
        elif isinstance(draft, Eagle1):
            _load_eagle(head, target, source, draft)
        elif isinstance(draft, Medusa):
            _load_medusa(head, target, source, draft)
    except (TypeError, IndexError, KeyError, AttributeError) as error:  # a public file may hold anything
        raise UserError(
            f"{head.place}: a field of config.json or a tensor is of another kind than such a head's "
            f"({type(error).__name__}: {error})"
        ) from None


def parts_for(head: HeadDescription, target: HFTarget) -> tuple[FeatureSource, DraftModel]:
    """Return parts that ``head`` can be loaded into, not yet built.

    Raises:
        UserError: a configuration that describes no such parts.
    """
    fields = {name: value for name, value in head.config.items() if value is not None}
    try:
        if head.kind == "Medusa":
            return TopFeature(), Medusa(fields["num_heads"], fields["num_hidden_layers"], head="random")
        sizes = {
            "num_layers": fields["num_hidden_layers"],
            "intermediate": fields["intermediate_size"],
            "heads": fields["num_attention_heads"],
            "kv_heads": fields.get("num_key_value_heads", fields["num_attention_heads"]),
            "head_dim": fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]),
            "rope_base": _rope_base(fields, target),
        }
        if head.kind == "EAGLE":
            return TopFeature(), Eagle1(bias="fc.bias" in head.tensors and fields.get("bias") is not False, **sizes)
        blocks, width = target.spec.layers, fields["hidden_size"]
        own = EMBEDDING in head.tensors and not _is_targets(head.tensors[EMBEDDING], target)
        source = FusedFeature(
            list(layers_of(fields, default_layers(blocks), blocks, target.family)),
            None if width == target.spec.hidden else width,
            bool(fields.get("fc_norm")),
        )
        draft = Eagle3(
            head="random",
            embedding="own" if own else "target",
            rms_eps=fields["rms_norm_eps"],
            feedback="post_norm" if fields.get("norm_output") else "pre_norm",
            **sizes,
        )
        return source, draft
    except (UserError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{head.place}: config.json: {error}") from None


def _rope_base(fields: Mapping[str, Any], target: HFTarget) -> float | None:
    """Return the base of a plain rope; None for the target's own."""
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if same_rotary(fields, target.rotary(head_dim)):
        return None
    return float(rope_parameters(fields)["rope_theta"])  # another kind than the plain one is refused when it is loaded


# ------------------------------------------------------------------------------------------------------------- parts


def _load_eagle3(head: HeadDescription, target: HFTarget, source: FusedFeature, draft: Eagle3) -> None:
    tensors = dict(head.tensors)
    ids = _vocabulary(head, tensors, "lm_head.weight", target.spec.vocab)
    _build(head, target, source, draft, ids)
    refuse_eagle3(head, target, source, draft)
    embedding = tensors.pop(EMBEDDING, None)
    if draft.embedding == "own" and embedding is not None:
        tensors["embed.tokens.weight"] = embedding
    elif embedding is not None and not _is_targets(embedding, target):
        raise UserError(f"{head.place}: holds an embedding of its own; set model.draft.embedding: own")
    wanted = source.state_dict() | _weights(draft)
    _fit(head, wanted, tensors)
    source.load_state_dict({name: tensors[name] for name in source.state_dict()})
    _load_draft(draft, {name: tensors[name] for name in _weights(draft)})


def _load_eagle(head: HeadDescription, target: HFTarget, source: FeatureSource, draft: Eagle1) -> None:
    tensors = dict(head.tensors)
    denied = head.config.get("bias") is False and "fc.bias" in tensors  # SGLang's fc always has one
    if denied and bool(tensors.pop("fc.bias").any()):
        raise UserError(f"{head.place}: config.json: bias is false, and fc.bias is not 0; correct the wrong one")
    if draft.bias != ("fc.bias" in tensors):
        raise UserError(
            f"{head.place}: fc has {'a' if not draft.bias else 'no'} bias; set model.draft.bias: "
            f"{str(not draft.bias).lower()}"
        )
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None and not _is_targets(embedding, target):
        raise UserError(f"{head.place}: holds an embedding other than the target's; another target is needed")
    _build(head, target, source, draft, torch.arange(target.spec.real_vocab))
    refuse_eagle(head, target, draft)
    _fit(head, _weights(draft), tensors)
    _load_draft(draft, tensors)


def _load_medusa(head: HeadDescription, target: HFTarget, source: FeatureSource, draft: Medusa) -> None:
    tensors = dict(head.tensors)
    ids = _vocabulary(head, tensors, "lm_heads.0.weight", target.spec.vocab)
    _build(head, target, source, draft, ids)
    refuse_medusa(head, target, draft)
    if draft.head == "frozen":  # all steps share one
        copies = [tensors.pop(f"lm_heads.{step}.weight") for step in range(draft.steps)]
        if not all(torch.equal(copies[0], copy) for copy in copies):
            raise UserError(f"{head.place}: its steps have heads of their own; set model.draft.head: target")
        tensors["lm_heads.0.weight"] = copies[0]
    _fit(head, _weights(draft), tensors)
    _load_draft(draft, tensors)


def _build(head: HeadDescription, target: HFTarget, source: FeatureSource, draft: DraftModel, ids: Tensor) -> None:
    try:
        draft.build(target, source.build(target), ids)
    except ValueError as error:
        raise UserError(f"{head.place}: model: {error}") from None


def _weights(draft: DraftModel) -> dict[str, Tensor]:
    """Return the tensors of a draft, its vocabulary's maps left out."""
    return {name: value for name, value in draft.state_dict().items() if not name.startswith("draft_vocab.")}


def _load_draft(draft: Eagle3 | Eagle1 | Medusa, state: Mapping[str, Tensor]) -> None:
    maps = {f"draft_vocab.{name}": value for name, value in draft.draft_vocab.state_dict().items()}
    draft.load_state_dict(dict(state) | maps)


def _fit(head: HeadDescription, wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not exactly those wanted, listed by what is wrong with them."""
    faults = {
        "no tensor": [name for name in wanted if name not in tensors],
        "tensors that no such head has:": sorted(set(tensors) - set(wanted)),
        "of another shape than the experiment's:": [
            f"{name} is {list(tensors[name].shape)}, {list(value.shape)} fits"
            for name, value in wanted.items()
            if name in tensors and tensors[name].shape != value.shape
        ],
    }
    listed = [f"{what} {', '.join(names[:LISTED])}{_more(names)}" for what, names in faults.items() if names]
    if listed:
        raise UserError(f"{head.place}: {'; '.join(listed)}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - LISTED} more" if len(names) > LISTED else ""


# -------------------------------------------------------------------------------------------------------- vocabulary


def _vocabulary(head: HeadDescription, tensors: dict[str, Tensor], rows_of: str, vocab: int) -> Tensor:
    """Take the maps out of ``tensors`` and return the kept target ids, ascending.

    Raises:
        UserError: a map that is none, of another length than the head's rows, or missing for a reduced vocabulary.
    """
    rows = tensors[rows_of].shape[0] if rows_of in tensors else 0
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = head.config.get("draft_vocab_size")
    if rows == 0:  # named among the missing ones afterwards
        rows = vocab if d2t is None else len(d2t)
    try:
        if size not in (None, rows):
            raise ValueError(f"config.json says draft_vocab_size {size}, and {rows_of} has {rows} rows")
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
