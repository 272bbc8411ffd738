"""Proposals of a trained draft that reads the target's features: one draft forward a tree level.

The draft keeps a cache of its own. Rows that saw the target's features are committed; what it drafts below the root is
scratch, forgotten with the round: after each verdict the accepted path is read again with the target's true features,
so the draft's cache is always that of a fresh start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.cache import KVCache
from eagle3_lab.decode.drawn import split
from eagle3_lab.decode.grow import Grow
from eagle3_lab.decode.growth import Grown, top
from eagle3_lab.decode.verify import Uniforms
from eagle3_lab.draft.cached import Cached
from eagle3_lab.rows import shift
from eagle3_lab.types import (
    Carry,
    DraftModel,
    DraftOut,
    FeatureSource,
    Needs,
    Proposer,
    Rows,
    TargetOut,
    Tree,
    Verdict,
)


class Eagle(Proposer):
    """Grows a token tree with a draft head.

    A tree that draws takes its randomness from streams split off each row's generator at the start, the same number a
    round: what a row is offered depends on no other row.

    Args:
        source: turns the target's taps into features.
        draft: the head, built for this target; both in eval mode, on the target's device.
        grow: the tree's shape.
        num_layers: decoder blocks of the target (the source's layer rule needs it).
        max_positions: the context up to which the draft's angles are sound; None: no limit.

    Raises:
        ValueError: the tree is wider than the draft vocabulary, has more levels than the draft has steps, or is deeper
            than the draft's context is long.
    """

    # Set by `start`: streams to draw from, the draft's cache, and the rows held back: features, the tokens after them,
    # how many are real.
    _streams: list[torch.Generator]
    _cache: KVCache
    _features: Float[Tensor, "B T D"]
    _next: Int[Tensor, "B T"]
    _count: Int[Tensor, " B"]

    def __init__(
        self,
        source: FeatureSource,
        draft: DraftModel,
        grow: Grow,
        num_layers: int,
        max_positions: int | None = None,
    ) -> None:
        grow.check(len(draft.vocab))
        if draft.steps is not None and grow.levels > draft.steps:
            raise ValueError(f"a tree of {grow.levels} levels needs as many heads, the draft has {draft.steps}")
        self._source, self._draft, self._grow = source, draft, grow
        self.needs = Needs(layers=source.layers(num_layers))
        self.nodes = grow.nodes
        self.grown: Grown | None = None  # the last tree proposed
        if max_positions is not None:
            if grow.levels > max_positions:
                raise ValueError(f"a tree of {grow.levels} levels does not fit the draft's context of {max_positions}")
            # With the root at r the anchor is at r - 1, and the last rows run, of level levels - 1, at r + levels - 2.
            self.positions = max_positions - grow.levels + 2

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._streams = split(generators) if self._grow.draws else []
        scratch = sum(self._grow.widths) + self._grow.levels + 1
        self._cache = KVCache(self._draft.num_layers, len(prompt), capacity + scratch, prompt.device)
        self._await(self._source(out.taps), shift(prompt, 1), lengths)

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        carry, log_q = self._read(root)
        draws = self._grow.draws
        growth = self._grow.begin(Uniforms.draw(self._streams, draws, root.device) if draws else None)
        frontier = growth.expand(log_q)
        anchor = self._cache.lengths - 1
        written, level = 0, 0
        while frontier is not None:
            level += 1
            width = frontier.tokens.shape[1]
            rows = Rows(position=(anchor + level)[:, None].expand(-1, width), visible=frontier.visible)
            context = Cached(self._cache, written)
            carry = _pick(carry, frontier.parent)
            out = self._draft.step(carry, self._draft.vocab[frontier.tokens], rows, level, context)
            carry = out.carry
            written += width
            frontier = growth.expand(self._log_q(out, level))
        self.grown = growth.finish()
        return self.grown.tree(root, self._draft.vocab)

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        path = verdict.path.clamp(min=0)
        taps = tuple(_rows(tap, path) for tap in out.taps)
        following = shift(tree.tokens.gather(1, path), 1)
        finished = verdict.path[:, 0] < 0
        self._await(self._source(taps), following, torch.where(finished, 0, verdict.length + 1))

    def draft_once(self, width: int) -> None:
        """The work of one level of ``width`` rows below the root, thrown away: what a level costs, after `start`."""
        cache, vocab = self._cache, self._draft.vocab
        ids = vocab[torch.arange(width, device=vocab.device)].expand(len(self._next), -1)
        itself = torch.eye(width, dtype=torch.bool, device=vocab.device).expand(len(ids), -1, -1)
        rows = Rows(position=cache.lengths[:, None].expand(-1, width), visible=itself)
        carry = _pick(self._draft.start(self._features), torch.zeros_like(ids))
        top(self._log_q(self._draft.step(carry, ids, rows, 1, Cached(cache)), 1), width)

    # ---- reading what the target confirmed

    def _await(self, features: Tensor, following: Tensor, count: Tensor) -> None:
        """Hold rows back until the next root is known: it is the last row's token."""
        self._features, self._next, self._count = features, following, count

    def _read(self, root: Int[Tensor, " B"]) -> tuple[Carry, Float[Tensor, "B one Vd"]]:
        """Run the rows held back, commit them; the last real row's carry and log-probabilities."""
        count, width = self._count, self._next.shape[1]
        last = (count - 1).clamp(min=0)[:, None]
        ids = self._next.scatter(1, last, root[:, None])
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        rows = Rows(position=self._cache.slots(width), visible=causal.expand(len(ids), -1, -1))
        out = self._draft.step(self._draft.start(self._features), ids, rows, 0, Cached(self._cache))
        self._cache.advance(count, bound=width)
        return _pick(out.carry, last), self._log_q(DraftOut(_rows(out.head_in, last), out.carry), 0)

    def _log_q(self, out: DraftOut, s: int) -> Float[Tensor, "B F Vd"]:
        """The draft's confidence: log-softmax at temperature 1, in float32 (float64 stays)."""
        batch, rows = out.head_in.shape[:2]
        logits = self._draft.logits(out.head_in.flatten(0, 1), s).unflatten(0, (batch, rows))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _rows(x: Float[Tensor, "B T D"], index: Int[Tensor, "B F"]) -> Float[Tensor, "B F D"]:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _pick(carry: Carry, index: Int[Tensor, "B F"]) -> Carry:
    """Rows of a carry, which is a tensor or a tuple of them, by index; what they mean is the draft's business."""
    return tuple(_part(one, index) for one in carry) if isinstance(carry, tuple) else _part(carry, index)


def _part(x: Tensor, index: Int[Tensor, "B F"]) -> Tensor:
    wide = index.reshape(*index.shape, *(1 for _ in x.shape[2:]))
    return x.gather(1, wide.expand(-1, -1, *x.shape[2:]))
