"""One Hugging Face causal LM as the lab's target: features for training, scored trees for decoding.

transformers' own model code runs unchanged, with our 4-D mask, our positions and our slot cache. Nothing of a model
family is known here but what the model says of itself; what cannot be right is refused at load, and a numeric probe has
the last word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from eagle3_lab.cache import KVCache
from eagle3_lab.errors import UserError
from eagle3_lab.types import (
    PADDING,
    Batch,
    FrozenTarget,
    LogitSummary,
    Needs,
    Rotary,
    Session,
    TargetOut,
    TargetSpec,
    Tree,
    Verdict,
)

SUMMARY_BYTES = 256 * 2**20
"""Bound on the float32 logits alive at once while they are summarised."""

_UNSOUND_ROPE = ("dynamic", "longrope")  # their angles depend on the longest row of the batch


class HFTarget(FrozenTarget):
    """A loaded model, its tokenizer, and everything the lab asks of them.

    Args:
        model: any causal LM with full attention; put in eval mode, its parameters frozen.
        tokenizer: the tokenizer that goes with it; None where only tensors are asked for.
        spec: sizes and identity.

    Raises:
        UserError: the model's attention, rope or signature cannot be decoded by trees, by name of what is wrong.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, spec: TargetSpec) -> None:
        if reasons := refusals(model):
            raise UserError(f"target {spec.name}: {'; '.join(reasons)}; a decoder with full attention would be right")
        self.model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self.spec = spec
        self._config = model.config.get_text_config(decoder=True)
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._blocks = _blocks(model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; a target made of tensors alone has none to ask for."""
        assert self._tokenizer is not None, "this target was made without a tokenizer"
        return self._tokenizer

    # ---- as the draft sees it

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows Dt"]:
        return self.model.get_input_embeddings()(ids)

    def logits(self, top: Float[Tensor, "*rows Dt"]) -> Float[Tensor, "*rows V"]:
        """The head on states after the final norm, with the scales and the soft cap that some families add."""
        return self._scaled(self.model.get_output_embeddings()(top))

    def head_over(self, ids: Int[Tensor, " Vd"]) -> Callable[[Tensor], Tensor]:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or ids.shape[0] == head.out_features:
            return super().head_over(ids)
        weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]
        return lambda top: self._scaled(nn.functional.linear(top, weight, bias))

    def _scaled(self, out: Tensor) -> Tensor:
        config = self._config.to_dict()
        if (scale := config.get("logit_scale")) is not None:  # cohere
            out = out * scale
        if (scale := config.get("logits_scaling")) is not None:  # granite
            out = out / scale
        if cap := config.get("final_logit_softcapping"):  # gemma
            out = cap * torch.tanh(out / cap)
        return out

    def head_rows(self, ids: Int[Tensor, " M"]) -> Float[Tensor, "M Dt"]:
        return self.model.get_output_embeddings().weight[ids]

    def rotary(self, head_dim: int | None = None) -> Rotary:
        """The target's inverse frequencies; at another head width, the same rule computed for that width."""
        module = _rotary_module(self.model)
        if head_dim in (None, self.spec.head_dim):
            return Rotary(module.inv_freq.detach().clone(), float(module.attention_scaling))
        config = type(self._config).from_dict({**self._config.to_dict(), "head_dim": head_dim})
        other = type(module)(config=config).to(module.inv_freq.device)
        return Rotary(other.inv_freq.detach().clone(), float(other.attention_scaling))

    @property
    def device(self) -> torch.device:
        return self._embedding_weight().device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_weight().dtype

    def _embedding_weight(self) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    # ---- training: one forward over packed rows

    @torch.no_grad()
    def features(self, batch: Batch, needs: Needs) -> TargetOut:
        """What ``needs`` names, of every row of a packed batch: a row sees its own document up to itself.

        Runs outside inference mode, since a draft's graph saves what comes out.
        """
        seen = batch.document[:, :, None] == batch.document[:, None, :]  # padding sees padding: finite, never used
        seen &= torch.ones_like(seen[0]).tril()
        return self._forward(batch.ids, batch.position, seen, None, needs)

    @torch.no_grad()
    def summary(self, top: Float[Tensor, "M Dt"]) -> LogitSummary:
        """Arg-max and log-normaliser (at least float32) of M rows of logits, never more than SUMMARY_BYTES of them at
        once."""
        parts = []
        for some in top.split(max(1, SUMMARY_BYTES // (4 * self.spec.vocab))):
            logits = self.logits(some)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            parts.append((logits.argmax(-1), logits.logsumexp(-1)))
        argmax, log_sum = map(torch.cat, zip(*parts, strict=True))
        return LogitSummary(argmax, log_sum)

    # ---- decoding

    def open(self, batch: int, capacity: int, needs: Needs) -> HFSession:
        """A session for ``batch`` sequences of at most ``capacity`` positions, trees included."""
        return HFSession(self, batch, capacity, needs)

    def _forward(
        self,
        ids: Int[Tensor, "B T"],
        position: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B T S"],
        cache: Cache | None,
        needs: Needs,
        logit_rows: Int[Tensor, "B L"] | None = None,
    ) -> TargetOut:
        """The body once, tapped where ``needs`` says; logits of ``logit_rows`` (None: all rows)."""
        with _tapped(self._blocks, needs.layers) as taps:
            out = self.model.base_model(
                input_ids=ids,
                attention_mask=_mask(self.model, visible, self.dtype),
                position_ids=position,
                use_cache=cache is not None,
                **({} if cache is None else {self._cache_argument: cache}),
            )
        top = out.last_hidden_state
        taps[len(self._blocks)] = top  # Hugging Face's last hidden state is the one after the norm
        logits = None
        if needs.logits:
            rows = (
                top if logit_rows is None else torch.gather(top, 1, logit_rows[..., None].expand(-1, -1, top.shape[-1]))
            )
            logits = self.logits(rows)
        return TargetOut(tuple(taps[i] for i in needs.layers), top if needs.top else None, logits)


class HFSession(Session):
    """A target decoding B sequences: a slot cache, trees scored in one forward, accepted paths kept."""

    def __init__(self, target: HFTarget, batch: int, capacity: int, needs: Needs) -> None:
        self._target = target
        self._needs = Needs(needs.layers, needs.top, logits=True)
        self.cache = KVCache(target.spec.layers, batch, capacity, target.device)
        self._slots = _SlotCache(self.cache)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        return self.cache.lengths

    @torch.inference_mode()
    def prefill(self, ids: Int[Tensor, "B L"], lengths: Int[Tensor, " B"]) -> TargetOut:
        """Read right-padded prompts of ``lengths`` tokens into an empty cache, or behind what is committed.

        A row of length 0 keeps nothing, and its logits mean nothing."""
        width = ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        position = self.cache.slots(width)
        last = (lengths - 1).clamp(min=0)[:, None]
        out = self._run(ids, position, causal.expand(ids.shape[0], -1, -1), last)
        self.cache.advance(lengths, bound=width)
        self.cache.settle()
        return out

    @torch.inference_mode()
    def score(self, tree: Tree, done: int = 0) -> TargetOut:
        """Nodes ``done`` .. N-1 in one forward; node i goes to scratch slot i, at position committed + depth(i)."""
        visible = tree.visible()
        position = self.cache.lengths[:, None] + (visible.sum(-1) - 1).clamp(min=0)
        return self._run(tree.tokens[:, done:], position[:, done:], visible[:, done:], None)

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        """Keep the root and the accepted drafts; a row whose path is all PADDING keeps nothing."""
        count = torch.where(verdict.path[:, 0] == PADDING, 0, verdict.length + 1)
        self.cache.keep(verdict.path, count)

    def _run(
        self,
        ids: Int[Tensor, "B T"],
        position: Int[Tensor, "B T"],
        uncommitted: Bool[Tensor, "B T M"],
        logit_rows: Int[Tensor, "B L"] | None,
    ) -> TargetOut:
        """Rows T are the last ones of the M uncommitted tokens."""
        count, scratch = ids.shape[1], uncommitted.shape[-1]
        self._slots.view = self.cache.view(scratch)
        self._slots.slots = self.cache.slots(count, scratch - count)
        visible = self.cache.visible(uncommitted, self._slots.view)
        return self._target._forward(ids, position, visible, self._slots, self._needs, logit_rows)


class _SlotLayer(CacheLayerMixin):
    """transformers' view of one layer of a :class:`KVCache`."""

    is_sliding, is_compileable, is_croppable = False, True, False

    def __init__(self, owner: _SlotCache, layer: int) -> None:
        super().__init__()
        self._owner, self._layer = owner, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write at the owner's slots, read to its view. What else transformers passes differs between versions."""
        owner = self._owner
        owner.cache.write(self._layer, key_states, value_states, owner.slots)
        return owner.cache.read(self._layer, owner.view)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.view, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.cache.capacity

    get_max_cache_shape = get_max_length


class _SlotCache(Cache):
    """A :class:`KVCache` in the shape transformers' models ask for; ``slots`` and ``view`` are set before a forward."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.view = cache.capacity
        self.slots = cache.slots(1)
        super().__init__(layers=[_SlotLayer(self, i) for i in range(len(cache._keys))])


def refusals(model: PreTrainedModel) -> list[str]:
    """Why a model cannot be decoded by trees with our mask and cache; empty where nothing speaks against it."""
    config = model.config.get_text_config(decoder=True)
    said = config.to_dict()
    parameters = inspect.signature(model.forward).parameters
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    rope = (said.get("rope_parameters") or {}).get("rope_type")
    attention = model.config._attn_implementation
    capped = bool(said.get("attn_logit_softcapping"))
    found = {
        f"cache layers {sorted(k.__name__ for k in kinds)}": kinds != {DynamicLayer},
        "recurrent state": model._is_stateful,
        "no position_ids": "position_ids" not in parameters,
        "ALiBi": bool(said.get("alibi")),
        "an encoder": bool(said.get("is_encoder_decoder")),
        f"rope type {rope!r}": rope in _UNSOUND_ROPE,
        f"soft-capped attention under {attention}, which drops the cap (eager keeps it)": capped
        and attention != "eager",
    }
    return [reason for reason, holds in found.items() if holds]


def _blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The one list of decoder blocks."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UserError(f"target: {len(found)} lists of {count} blocks found in {type(model).__name__}, one is needed")
    return found[0]


def _rotary_module(model: PreTrainedModel) -> Any:  # noqa: ANN401 (what it holds, families agree on by custom)
    """The one rotary module; drafts take their frequencies from it."""
    found = [m for m in model.base_model.modules() if "inv_freq" in dict(m.named_buffers(recurse=False))]
    if len(found) != 1:
        raise UserError(f"target: {len(found)} rotary embeddings found in {type(model).__name__}, one is needed")
    return found[0]


def _mask(model: PreTrainedModel, visible: Bool[Tensor, "B T S"], dtype: torch.dtype) -> Tensor:
    """The 4-D mask in the form the attention implementation reads: bool for sdpa, additive for eager."""
    if model.config._attn_implementation == "eager":  # a bool mask would be added as 0 and 1
        additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return additive.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
    return visible[:, None]


@contextmanager
def _tapped(blocks: nn.ModuleList, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states with ids in ``layers`` during one forward.

    Id i < n is the input of block i (the embedding for 0): a pre-hook sees it before any norm.
    """
    # Every key exists beforehand: a dict that grows inside a compiled forward costs a recompile.
    taken: dict[int, Tensor] = {}

    def take(layer: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            taken[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [blocks[i].register_forward_pre_hook(take(i), with_kwargs=True) for i in layers if i < len(blocks)]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
