"""Speculative sampling with a second language model: it reads the same tokens and drafts a chain.

The draft model decodes in a session of its own, exactly as the target does in its: it scores a chain that grows draft
by draft and commits what the target's verdict kept. Node 0 of its chain is the token before the root, so that the last
draft of a chain accepted whole, which it has proposed but not read, is read with the next root in one forward:

    target's tree       root x1 x2 x3            draft's chain       before root x1 x2
    path of 2 accepted  root x1 x2               the same indices    before root x1       then before' = x2

so the target's verdict is the draft's too, index by index, and every forward has the same shape for all rows.

Source: Leviathan et al. 2023; Chen et al. 2023. Adaptive lengths: transformers' assisted decoding, "heuristic".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.decode.sampled_trees import require_draft_law, split
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import MOST_LEVELS, require_size
from eagle3_lab.decode.trees import chain
from eagle3_lab.decode.verify import Uniforms, inverse_cdf
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Proposer, Session
from eagle3_lab.types import PADDING, TargetOut, Tree, Verdict


@dataclass(frozen=True)
class Lengths:
    """How many drafts a round proposes: ``length``; if ``adaptive``, two more after a round that accepted all of them,
    one less after any other, within 1 and ``longest``. Each row by its own rounds alone.

    Raises ValueError for a length outside 1 .. `MOST_LEVELS`, and where adaptive for a length above ``longest`` or a
    ``longest`` above `MOST_LEVELS`.
    Source: transformers generation/candidate_generator.py, AssistedCandidateGenerator.update_candidate_strategy.
    """

    length: int = 5
    adaptive: bool = True
    longest: int = 12

    def __post_init__(self) -> None:
        require_size("length", self.length, MOST_LEVELS)
        if self.adaptive:
            require_size("max_length", self.longest, MOST_LEVELS)
        if self.adaptive and self.length > self.longest:
            raise ValueError(f"length must be at most max_length {self.longest}, got {self.length}")

    @property
    def most(self) -> int:
        return self.longest if self.adaptive else self.length

    def after(self, length: Int[Tensor, " B"], accepted: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """The next round's length of each row."""
        if not self.adaptive:
            return length
        return torch.where(accepted >= length, length + 2, length - 1).clamp(1, self.longest)

    def bound_after(self, bound: int, accepted: int, rows: int) -> int:
        """No row's next length exceeds this, known without asking the device; exact for one row. ``bound`` is that of
        the round before, ``accepted`` the most drafts any row accepted in it."""
        if not self.adaptive:
            return bound
        grown = accepted + 2 if rows > 1 or accepted >= bound else 1
        return min(max(bound - 1, grown), self.longest)


class SpeculativeSampling(Proposer):
    """Drafts a chain with a causal LM over the same tokens.

    Sampling: draft i is drawn from ``law`` of the draft's logits, and the tree carries that very law as q, over the ids
    both models have. Greedy (``law`` at temperature 0): the candidates are fixed and q is None. A one-hot q would judge
    the same way (accept x with p(x), else p without x), at the price of a [B, N, V] tensor and a pass over it.

    Draws come from streams split off each row's generator at the start (see :func:`split`), a fixed number a round:
    what a row is offered, and what its verifier draws, depend on no other row.

    Args:
        open_session: makes the draft model's session for (rows, positions).
        vocab: ids the draft model knows: below this. Both models' ids mean the same.
        target_vocab: width of q.
        max_positions: the draft model's context.
        lengths: how many drafts a round.
        law: from the draft's logits to q; no penalties, which q does not need to be a law.

    Raises:
        ValueError: a law with a repetition penalty, or chains that the draft's context cannot hold.
    """

    _opened: Session | None = None
    _generators: list[torch.Generator]
    _before: Int[Tensor, " B"]  # the token before the root
    _length: Int[Tensor, " B"]  # drafts of the next round
    _bound: int  # no row's is larger

    def __init__(
        self,
        open_session: Callable[[int, int], Session],
        *,
        vocab: int,
        target_vocab: int,
        max_positions: int,
        lengths: Lengths,
        law: SamplingLaw,
    ) -> None:
        require_draft_law(law)
        if lengths.most + 1 > max_positions:
            raise ValueError(f"the longest chain must fit the draft's context {max_positions}, got {lengths.most}")
        self.nodes = lengths.most + 1
        # The last draft read, x[most - 1], stands most - 1 positions behind the root.
        self.positions = max_positions - lengths.most + 1
        self._open, self._lengths, self._law = open_session, lengths, law
        self._vocab, self._shared, self._target_vocab = vocab, min(vocab, target_vocab), target_vocab

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Read the prompts but for their last tokens. A prompt beyond the draft's context is read as far as it goes:
        the loop asks no draft for it."""
        self._generators = split(generators)
        self._length = torch.full_like(lengths, self._lengths.length)
        self._bound = self._lengths.length
        self._before = prompt.gather(1, lengths[:, None] - 1)[:, 0]
        self._opened = None  # first, so that its memory, and what was recorded with it, serves the next one
        self._opened = self._open(len(prompt), capacity)
        read = (lengths - 1).clamp(max=self._room)
        self._session.prefill(self._known(prompt[:, : self._room + 1]), read)
        if self._session.lengths.device != prompt.device:
            raise UserError(
                f"draft model: on {self._session.lengths.device}, the target on {prompt.device}; give both one device"
            )

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        greedy = self._law.temperature == 0
        uniforms = None
        if not greedy:
            uniforms = Uniforms.draw(self._generators, self.nodes - 1, root.device).uniforms
        text, laws = [self._before, root], []  # the draft's chain
        for i in range(self._bound):
            logits = self._next_logits(text, done=0 if i == 0 else i + 1)
            if uniforms is None:
                text.append(logits.argmax(-1))
            else:
                laws.append(self._law.filtered(logits[:, None])[:, 0])
                text.append(inverse_cdf(laws[-1], uniforms[:, i]))
        drafts = root.new_zeros(len(root), self.nodes)
        drafts[:, : len(text) - 1] = torch.stack(text[1:], dim=1)
        tree = chain(drafts, self._length)
        return tree if greedy else Tree(tree.tokens, tree.parents, tree.candidate, self._q(laws))

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        kept = verdict.path != PADDING
        count = kept.sum(1)
        before = tree.tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self._before = torch.where(count > 0, before, self._before)
        # A row that would outgrow the draft's context stays where it is: it is drafted for no more.
        fits = (self._session.lengths + count <= self._room)[:, None]
        path = verdict.path.masked_fill(~fits, PADDING)
        self._session.commit(Verdict(path, torch.where(fits[:, 0], verdict.length, -1), verdict.bonus))
        self._length = self._lengths.after(self._length, verdict.length)
        self._bound = self._lengths.bound_after(self._bound, kept.shape[1] - 1, len(kept))

    @property
    def _session(self) -> Session:
        assert self._opened is not None, "start comes first"
        return self._opened

    @property
    def _room(self) -> int:
        """Most tokens the draft may have committed with room for a chain behind them: the token before the root, the
        root, and all drafts but the last."""
        return self.positions - 2

    def _next_logits(self, text: list[Tensor], done: int) -> Float[Tensor, "B shared"]:
        """The draft's logits behind ``text``, over the ids both models have; nodes before ``done`` are read already."""
        tokens = self._known(torch.stack(text, dim=1))
        whole = tokens.new_full((len(tokens),), tokens.shape[1] - 1)
        out = self._session.score(chain(tokens, whole), done)
        assert out.logits is not None, "the draft model gives no logits"
        return out.logits[:, -1, : self._shared]

    def _known(self, ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """A target's embedding may have more rows than the draft's. What it says there no tokenizer reads, and whatever
        the draft takes it for is lawful."""
        return ids.clamp(max=self._vocab - 1)

    def _q(self, laws: list[Tensor]) -> Float[Tensor, "B N V"]:
        """q in target ids, a row a node; rows of nodes without children are zero."""
        q = laws[0].new_zeros(len(laws[0]), self.nodes, self._target_vocab)
        q[:, : len(laws), : self._shared] = torch.stack(laws, dim=1)
        return q
