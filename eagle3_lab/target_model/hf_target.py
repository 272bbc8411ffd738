"""One Hugging Face causal LM as the lab's target: features for training, scored trees for decoding.

transformers' own model code runs unchanged, with our 4-D mask, our positions and our slot cache. Nothing of a model
family is known here but what the model says of itself; what cannot be right is refused at load, and a numeric probe has
the last word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from eagle3_lab.backend.cuda_graphs import Captured, Record
from eagle3_lab.backend.prepacked_linear import PackedLinear, lay_out, multiply
from eagle3_lab.interfaces import LanguageModel, Target, TargetSession
from eagle3_lab.kv_cache import KVCache, few_sizes
from eagle3_lab.target_model.attention import by_document, spans, use_grouped
from eagle3_lab.target_model.decodable import (
    cache_argument,
    decoder_blocks,
    require_decodable,
    text_config,
    text_decoder,
)
from eagle3_lab.target_model.model_parts import rotary_module, rotary_of_module, tapped_states
from eagle3_lab.target_model.truncated import Truncated
from eagle3_lab.target_model.windows import Mask, Windows
from eagle3_lab.types import PADDING, Batch, LogitSummary, Needs, Rotary, TargetOut, TargetSpec, Tree, Verdict

if TYPE_CHECKING:
    import transformers


SUMMARY_BYTES = 256 * 2**20
"""Bound on the float32 logits alive at once while they are summarised."""


class HFTarget(Target):
    """A loaded model, its tokenizer, and everything the lab asks of them.

    Args:
        model: any causal LM with full attention, sliding windows included; put in eval mode, its parameters frozen.
        tokenizer: the tokenizer that goes with it; None where only tensors are asked for.
        spec: sizes and identity.
        record: records scored trees, one a shape, to be replayed; sessions then share caches, one after another. Drafts
            made for this target are recorded alike. None: every forward is run.

    Raises:
        UserError: the model's attention, rope or signature cannot be decoded by trees, by name of what is wrong.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase | None,
        spec: TargetSpec,
        record: Record | None = None,
    ) -> None:
        require_decodable(model, spec.name)
        self.model = model.eval().requires_grad_(False)
        use_grouped(model)
        self._tokenizer = tokenizer
        self.spec = spec
        self._config = text_config(model)
        self._decoder = text_decoder(model)
        self._windows = Windows.of(self._config)
        said = self._config.to_dict()  # a deep copy: not one a step
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # of cohere, granite and gemma
        self._scale, self._divisor, self._cap = map(said.get, names)
        self._cache_argument = cache_argument(self._decoder)
        self._blocks = decoder_blocks(model)
        self.record = record
        self._free: dict[tuple[int, int, Needs], list[_Memory]] = {}

    @property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The tokenizer; a target made of tensors alone has none to ask for."""
        assert self._tokenizer is not None, "this target was made without a tokenizer"
        return self._tokenizer

    @property
    def family(self) -> str:
        """The ``model_type`` of the language model's configuration."""
        return self._config.model_type

    @property
    def source(self) -> str:
        """Where other programs load this target from: the folder or hub id that transformers read it from."""
        return self.model.name_or_path or self.spec.name

    # ---- as the draft sees it

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows Dt"]:
        return self.model.get_input_embeddings()(ids)

    def logits(self, top: Float[Tensor, "*rows Dt"]) -> Float[Tensor, "*rows V"]:
        """The head on states after the final norm, with the scales and the soft cap that some families add."""
        return self._scaled(self.model.get_output_embeddings()(top)).to(top.device)  # a sharded head may lie elsewhere

    def head_over(self, ids: Int[Tensor, " Vd"]) -> Callable[[Tensor], Tensor]:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or ids.shape[0] == head.out_features:
            return super().head_over(ids)
        weight, bias = head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids]
        device, product = weight.device, partial(nn.functional.linear, weight=weight, bias=bias)
        if isinstance(head, PackedLinear) and (layout := lay_out(weight)) is not None:
            product = partial(multiply, layout=layout, bias=bias)
        return lambda top: self._scaled(product(top.to(device))).to(top.device)

    def _scaled(self, out: Tensor) -> Tensor:
        if self._scale is not None:
            out = out * self._scale
        if self._divisor is not None:
            out = out / self._divisor
        if self._cap:
            out = self._cap * torch.tanh(out / self._cap)
        return out

    def head_rows(self, ids: Int[Tensor, " M"]) -> Float[Tensor, "M Dt"]:
        weight = self.model.get_output_embeddings().weight
        return weight[ids.to(weight.device)].to(ids.device)

    def rotary(self, head_dim: int | None = None) -> Rotary:
        """The target's inverse frequencies; at another head width, the same rule computed for that width."""
        module = rotary_module(self.model)
        if head_dim in (None, self.spec.head_dim):
            return rotary_of_module(module)
        config = type(self._config).from_dict({**self._config.to_dict(), "head_dim": head_dim})
        return rotary_of_module(type(module)(config=config).to(self.device))

    @property
    def window(self) -> int | None:
        """How many positions its windowed layers look back over, their own included; None: all layers see all."""
        return self._windows.width

    def first_layers(self, count: int, *, train_embedding: bool = False) -> LanguageModel:
        def run(model: PreTrainedModel, spec: TargetSpec) -> Target:
            return HFTarget(model, self._tokenizer, spec, self.record)

        return Truncated(self, self.model, self.blocks, count, run, train_embedding=train_embedding)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks, first to last."""
        return self._blocks

    @property
    def device(self) -> torch.device:
        return self._embedding_weight().device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_weight().dtype

    def move(self, device: torch.device) -> None:
        """Carry the model to another device."""
        self.model.to(device)  # pyright: ignore[reportArgumentType]  transformers' decorator hides the signature

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
        return self.read(batch, needs)

    def read(self, batch: Batch, needs: Needs) -> TargetOut:
        """:meth:`features` with the gradient of whatever asks for one: of nothing in a frozen model."""
        seen = batch.document[:, :, None] == batch.document[:, None, :]  # padding sees padding: finite, never used
        seen &= torch.ones_like(seen[0]).tril()
        mask = self._windows.masks(seen, batch.position, batch.position, self.dtype)
        with by_document(spans(batch.document) if self.window is None else None):
            return self._forward(batch.ids, batch.position, mask, None, needs)

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
        needs = Needs(needs.layers, needs.top, logits=True)
        if self.record is None:
            return HFSession(self, needs, _Memory(KVCache(self.spec.layers, batch, capacity, self.device)))
        room = few_sizes(capacity)
        free = self._free.setdefault((batch, room, needs), [])
        if not free:
            cache = KVCache(self.spec.layers, batch, room, self.device, recorded=True)
            free.append(_Memory(cache, Captured(self.record, self.spec.name)))
        memory = free.pop()
        with torch.inference_mode():  # in which it was made
            memory.slots.cache.reset()
        session = HFSession(self, needs, memory)
        weakref.finalize(session, free.append, memory)
        return session

    def _forward(
        self,
        ids: Int[Tensor, "B T"],
        position: Int[Tensor, "B T"],
        mask: Mask,
        cache: transformers.Cache | None,
        needs: Needs,
        logit_rows: Int[Tensor, "B L"] | None = None,
    ) -> TargetOut:
        """The body once, tapped where ``needs`` says; logits of ``logit_rows`` (None: all rows)."""
        with tapped_states(self._blocks, needs.layers) as taps:
            out = self._decoder(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                use_cache=cache is not None,
                **({} if cache is None else {str(self._cache_argument): cache}),
            )
        top = out.last_hidden_state.to(ids.device)
        taps[len(self._blocks)] = top  # Hugging Face's last hidden state is the one after the norm
        logits = None
        if needs.logits:
            rows = (
                top if logit_rows is None else torch.gather(top, 1, logit_rows[..., None].expand(-1, -1, top.shape[-1]))
            )
            logits = self.logits(rows)
        # a sharded target's states lie with their layers; the draft stands with the embedding
        return TargetOut(tuple(taps[i].to(ids.device) for i in needs.layers), top if needs.top else None, logits)


class HFSession(TargetSession):
    """A target decoding B sequences: a slot cache, trees scored in one forward, accepted paths kept."""

    def __init__(self, target: HFTarget, needs: Needs, memory: _Memory) -> None:
        self._target, self._needs = target, needs
        self.cache, self._memory = memory.slots.cache, memory

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
        return self._run(tree.tokens[:, done:], position, visible[:, done:], None)

    @torch.inference_mode()
    def commit(self, verdict: Verdict) -> None:
        """Keep the root and the accepted drafts; a row whose path is all PADDING keeps nothing."""
        count = torch.where(verdict.path[:, 0] == PADDING, 0, verdict.length + 1)
        self.cache.keep(verdict.path, count)

    def _run(
        self,
        ids: Int[Tensor, "B T"],
        position: Int[Tensor, "B M"],
        uncommitted: Bool[Tensor, "B T M"],
        logit_rows: Int[Tensor, "B L"] | None,
    ) -> TargetOut:
        """Rows T are the last ones of the M uncommitted tokens; ``position`` is that of all M."""
        count, scratch = ids.shape[1], uncommitted.shape[-1]
        target, view = self._target, self.cache.view(scratch)
        slots = self.cache.slots(count, scratch - count)
        visible = self.cache.visible(uncommitted, view)
        rows = position[:, scratch - count :]
        mask = target._windows.masks(visible, rows, self.cache.positions(position, view), target.dtype)
        run, needs, graphs = self._memory.forward, self._needs, self._memory.graphs
        if graphs is None or logit_rows is not None:
            return run(target, needs, view, (slots, ids, rows), mask, logit_rows)
        names, masks = ((), (mask,)) if isinstance(mask, Tensor) else (tuple(mask), tuple(mask.values()))

        def forward(inputs: tuple[Tensor, ...]) -> TargetOut:  # outlives this session, and must not hold it
            shown = inputs[3:]
            return run(target, needs, view, inputs[:3], dict(zip(names, shown, strict=True)) if names else shown[0])

        return graphs.run(view, forward, (slots, ids, rows, *masks))


class _Memory:
    """What a session works in: a cache as transformers sees it, and the graphs that were recorded with it."""

    def __init__(self, cache: KVCache, graphs: Captured | None = None) -> None:
        from eagle3_lab.target_model.slot_cache import SlotCache

        self.slots, self.graphs = SlotCache(cache), graphs

    def forward(
        self,
        target: HFTarget,
        needs: Needs,
        view: int,
        rows: tuple[Tensor, ...],
        mask: Mask,
        logit_rows: Int[Tensor, "B L"] | None = None,
    ) -> TargetOut:
        """The target over ``rows`` (slots, ids and positions, [B, T] each), which see the first ``view`` slots."""
        slots, ids, position = rows
        self.slots.view, self.slots.slots = view, slots
        return target._forward(ids, position, mask, self.slots, needs, logit_rows)
