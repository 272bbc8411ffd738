"""Proposals of a trained draft that reads the target's features: one draft forward a tree level.

The draft keeps a cache of its own. Rows that saw the target's features are committed; what it drafts below the root is
scratch, forgotten with the round: after each verdict the accepted path is read again with the target's true features,
so the draft's cache is always that of a fresh start.

Where forwards are recorded, a whole round is one of them: reading what was confirmed, all levels, the tree. For that
the rows read have one width, that of the longest path; what lies behind a path's end is padding, read and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.backend.cuda_graphs import Captured, Inputs, Record
from eagle3_lab.decode.sampled_trees import split
from eagle3_lab.decode.tree_growth import Grown, top
from eagle3_lab.decode.tree_shapes import Grow
from eagle3_lab.decode.verify import Uniforms
from eagle3_lab.draft.attention.cached import Cached
from eagle3_lab.interfaces import DraftModel, FeatureSource, Proposer
from eagle3_lab.kv_cache import KVCache, few_sizes
from eagle3_lab.rows import shift
from eagle3_lab.types import PADDING, Carry, DraftOut, Needs, Rows, TargetOut, Tree, Verdict


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
        record: records a round's forwards as one, to be replayed; the draft's weights must then stay where they lie in
            memory, and caches are kept from one start to the next. None: every forward is run.

    Raises:
        ValueError: the tree is wider than the draft vocabulary, has more levels than the draft has steps, or is deeper
            than the draft's context is long.
    """

    # Set by `start`: streams to draw from, the draft's cache, what was recorded with it, and the rows held back:
    # features, the tokens after them, how many are real, and how many at most, which the host knows.
    _streams: list[torch.Generator]
    _cache: KVCache
    _graphs: Captured | None
    _features: Float[Tensor, "B T D"]
    _next: Int[Tensor, "B T"]
    _count: Int[Tensor, " B"]
    _most: int
    _behind_root: Carry | None  # where levels are timed

    def __init__(
        self,
        source: FeatureSource,
        draft: DraftModel,
        grow: Grow,
        num_layers: int,
        max_positions: int | None = None,
        record: Record | None = None,
    ) -> None:
        grow.check(len(draft.vocab))
        if draft.steps is not None and grow.levels > draft.steps:
            raise ValueError(f"a tree of {grow.levels} levels needs as many heads, the draft has {draft.steps}")
        self._source, self._draft, self._grow = source, draft, grow
        self.needs = Needs(layers=source.layers(num_layers))
        self.nodes = grow.nodes
        self.grown: Grown | None = None  # the last tree proposed
        self._record = record
        self._kept: dict[tuple[int, int], tuple[KVCache, Captured]] = {}
        if max_positions is not None:
            if grow.levels > max_positions:
                raise ValueError(f"a tree of {grow.levels} levels does not fit the draft's context of {max_positions}")
            # With the root at r the anchor is at r - 1, and the last rows run, of level levels - 1, at r + levels - 2.
            self.positions = max_positions - grow.levels + 2

    @torch.inference_mode()
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
        self._behind_root = None
        self._cache, self._graphs = self._memory(len(prompt), capacity + scratch, prompt.device)
        self._await(self._source(out.taps), shift(prompt, 1), lengths, prompt.shape[1])

    @torch.inference_mode()
    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        held = root, self._features, self._next, self._count, self._uniforms(root)
        if self._graphs is None or self._next.shape[1] != self._longest:  # a prompt, of any width
            self.grown = self._round(self._cache, None, *held)
        else:
            self.grown = self._replayed(self._graphs, held)
        return self.grown.tree(root, self._draft.vocab)

    @torch.inference_mode()
    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        path, most = verdict.path, verdict.path.shape[1]
        if self._graphs is not None:
            path, most = nn.functional.pad(path, (0, self._longest - most), value=PADDING), min(most, self._longest)
        path = path.clamp(min=0)
        taps = tuple(_rows(tap, path) for tap in out.taps)
        following = shift(tree.tokens.gather(1, path), 1)
        finished = verdict.path[:, 0] < 0
        self._await(self._source(taps), following, torch.where(finished, 0, verdict.length + 1), most)

    @torch.inference_mode()
    def draft_once(self, width: int) -> None:
        """The work of one level of ``width`` rows below the root, thrown away: what a level costs, after `start`."""
        cache, view = self._cache, self._cache.view(width)
        if self._behind_root is None:  # what a level continues, by the first call
            self._behind_root = self._level(cache, view, self._draft.start(self._features[:, :1]), 0, 1)[0]
        carry = self._behind_root

        def level(inputs: Inputs) -> tuple[Tensor, Tensor]:
            lengths, *parts = inputs
            continued = tuple(parts) if isinstance(carry, tuple) else parts[0]
            return self._level(cache.behind(lengths), view, continued, 1, width)[1]

        inputs = cache.lengths, *(carry if isinstance(carry, tuple) else (carry,))
        if self._graphs is None:
            level(inputs)
        else:
            self._graphs.run(("level", width, view), level, inputs)

    def _level(
        self, cache: KVCache, view: int, carry: Carry, s: int, width: int
    ) -> tuple[Carry, tuple[Tensor, Tensor]]:
        """Rows of step ``s`` that all continue the carry's first row and see themselves alone: carry, best tokens."""
        vocab = self._draft.vocab
        ids = vocab[torch.arange(width, device=vocab.device)].expand(cache.batch, -1)
        itself = torch.eye(width, dtype=torch.bool, device=vocab.device).expand(len(ids), -1, -1)
        rows = Rows(position=cache.lengths[:, None].expand(-1, width), visible=itself)
        out = self._draft.step(_pick(carry, torch.zeros_like(ids)), ids, rows, s, Cached(cache, view=view))
        return out.carry, top(self._log_q(out, s), width)

    # ---- a round, as it is run and as it is replayed

    @property
    def _longest(self) -> int:
        """Of all paths, the root included."""
        return self._grow.levels + 1

    def _memory(self, batch: int, capacity: int, device: torch.device) -> tuple[KVCache, Captured | None]:
        """An empty cache, and what was recorded with it."""
        layers = self._draft.num_layers
        if self._record is None:
            return KVCache(layers, batch, capacity, device), None
        room = few_sizes(capacity)
        if (batch, room) not in self._kept:
            self._kept[batch, room] = KVCache(layers, batch, room, device, True), Captured(self._record, "the draft")
        cache, graphs = self._kept[batch, room]
        cache.reset()
        return cache, graphs

    def _uniforms(self, root: Int[Tensor, " B"]) -> Float[Tensor, "B draws"]:
        """A round's randomness, drawn before it: what is recorded draws nothing anew."""
        if not self._grow.draws:
            return root.new_empty(len(root), 0, dtype=torch.float64)
        return Uniforms.draw(self._streams, self._grow.draws, root.device).uniforms

    def _replayed(self, graphs: Captured, held: tuple[Tensor, ...]) -> Grown:
        """A round of the recorded width. Where its rows stand is an input: of the host's numbers a recorded forward
        keeps what they were, so all its reads span one view, which the longest path and every level fit in."""
        cache = self._cache
        view = cache.view(self._longest + sum(self._grow.widths))

        def forward(inputs: Inputs) -> Grown:
            lengths, *held = inputs
            return self._round(cache.behind(lengths), view, *held)

        grown = graphs.run(("round", view), forward, (cache.lengths, *held))
        cache.advance(self._count, bound=self._most)
        return grown

    def _round(
        self,
        cache: KVCache,
        view: int | None,
        root: Int[Tensor, " B"],
        features: Float[Tensor, "B T D"],
        following: Int[Tensor, "B T"],
        count: Int[Tensor, " B"],
        uniforms: Float[Tensor, "B draws"],
    ) -> Grown:
        """Read and commit the rows held back, and grow a tree behind them."""
        carry, log_q = self._read(cache, view, root, features, following, count)
        growth = self._grow.begin(Uniforms(uniforms))
        frontier = growth.expand(log_q)
        anchor = cache.lengths - 1
        written, level = 0, 0
        while frontier is not None:
            level += 1
            width = frontier.tokens.shape[1]
            rows = Rows(position=(anchor + level)[:, None].expand(-1, width), visible=frontier.visible)
            context = Cached(cache, written, view)
            carry = _pick(carry, frontier.parent)
            out = self._draft.step(carry, self._draft.vocab[frontier.tokens], rows, level, context)
            carry = out.carry
            written += width
            frontier = growth.expand(self._log_q(out, level))
        return growth.finish()

    # ---- reading what the target confirmed

    def _await(self, features: Tensor, following: Tensor, count: Tensor, most: int) -> None:
        """Hold rows back until the next root is known: it is the last row's token."""
        self._features, self._next, self._count, self._most = features, following, count, most

    def _read(
        self, cache: KVCache, view: int | None, root: Tensor, features: Tensor, following: Tensor, count: Tensor
    ) -> tuple[Carry, Float[Tensor, "B one Vd"]]:
        """Run the rows held back, commit them; the last real row's carry and log-probabilities."""
        width = following.shape[1]
        last = (count - 1).clamp(min=0)[:, None]
        ids = following.scatter(1, last, root[:, None])
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        rows = Rows(position=cache.slots(width), visible=causal.expand(len(ids), -1, -1))
        out = self._draft.step(self._draft.start(features), ids, rows, 0, Cached(cache, view=view))
        cache.advance(count, bound=width)
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
