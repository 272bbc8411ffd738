"""transformers' own attention, but for what it copies and for what it computes in vain.

A few rows over a long cache, key heads unrepeated:

transformers' sdpa repeats every key and value head for each query head that shares it wherever there is a mask and more
than one row, so each layer of each round copies its cache several times over. Here the query heads of one key head
become rows of it, and the mask, which is small where rows are few, is repeated in their place.

Packed rows, document by document: under a mask every row's scores with all rows are computed, those of other documents
and of later rows too. A causal call a document computes a sixth of that where three documents share a row.

Everything else goes to transformers' function as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from eagle3_lab.types import PADDING

if TYPE_CHECKING:
    import transformers  # takes a second

SDPA, GROUPED = "sdpa", "eagle3_lab_grouped_sdpa"

_OTHERS = {"position_bias", "softcap", "s_aux"}
"""What some families' attention needs beside a mask; whoever gives one gets transformers' function."""


Span = tuple[int, int, int]
"""A document: its row of the batch, its first column, and the one behind its last."""

_documents: ContextVar[Sequence[Span] | None] = ContextVar("documents", default=None)


def spans(document: Int[Tensor, "B T"]) -> list[Span] | None:
    """Where documents lie, padding left out: one wait for the device. None where one lies in pieces."""
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    row, column = begins.nonzero().unbind(-1)
    found = torch.stack((row, column, document[row, column]), dim=-1).tolist()
    ends = [
        *(c if r == before else document.shape[1] for (before, *_), (r, c, _) in pairwise(found)),
        document.shape[1],
    ]
    kept = [(r, c, end, name) for (r, c, name), end in zip(found, ends, strict=True) if name != PADDING]
    if len({(r, name) for r, _, _, name in kept}) < len(kept):
        return None
    return [(r, c, end) for r, c, end, _ in kept]


@contextmanager
def by_document(documents: Sequence[Span] | None) -> Iterator[None]:
    """Meanwhile the rows at hand are of these documents, whatever a mask says, and each sees its own up to itself;
    None: the mask says it. Rows of none get zeros."""
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,  # noqa: ANN401 - what a family's attention passes on differs from version to version
) -> tuple[Tensor, Tensor | None]:
    """An attention function as transformers calls it: query (B, heads, T, d), key and value (B, kv_heads, S, d), an
    additive or boolean mask (B, 1, T, S); out (B, T, heads, d).

    Source: transformers integrations/sdpa_attention.py, which repeats keys and values (`repeat_kv`)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    heads, rows, width = query.shape[1:]
    kv_heads = key.shape[1]
    shared = heads // kv_heads
    few = rows <= 2 * kv_heads * width  # no more is copied of the mask than would be of keys and values
    plain = attention_mask is not None and attention_mask.shape[1] == 1 and more.keys().isdisjoint(_OTHERS)
    if plain and (documents := _documents.get()) is not None:
        out = query.new_zeros(query.shape[0], rows, heads, value.shape[-1])
        for row, begin, end in documents:
            q, k, v = (x[row : row + 1, :, begin:end] for x in (query, key, value))
            said, _ = sdpa_attention_forward(
                module, q, k, v, None, dropout=dropout, scaling=scaling, is_causal=True, **more
            )
            out[row, begin:end] = said[0]
        return out, None
    if attention_mask is None or not (shared > 1 and few and plain):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
    mask = attention_mask if rows == 1 else attention_mask.repeat(1, 1, shared, 1)  # one row's is every head's
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(-1, kv_heads, shared * rows, width), key, value, mask, dropout, scale=scaling
    )
    return out.reshape(-1, heads, rows, out.shape[-1]).transpose(1, 2).contiguous(), None


def use_grouped(model: transformers.PreTrainedModel) -> bool:
    """Let a model that runs by sdpa run by `grouped_attention`; whether it does. A family whose code does not ask for
    its attention by name stays as it is."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    if model.config._attn_implementation == SDPA and type(model)._can_set_attn_implementation():
        model.set_attn_implementation(GROUPED)
    return model.config._attn_implementation == GROUPED


@contextmanager
def stock_attention(*models: transformers.PreTrainedModel) -> Iterator[None]:
    """transformers' own attention meanwhile, for what is measured as transformers' own."""
    ours = [model for model in models if model.config._attn_implementation == GROUPED]
    for model in ours:
        model.set_attn_implementation(SDPA)
    try:
        yield
    finally:
        for model in ours:
            model.set_attn_implementation(GROUPED)
