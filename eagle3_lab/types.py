"""Records that the parts exchange, the letters of their shapes, and the row convention.

Letters, one meaning everywhere in shapes and comments:

    B  batch            T  rows (positions)      V   target vocabulary   Vd  draft vocabulary
    Dt target width     D  draft width           N   tree nodes          A   accepted path, root first
    M  uncommitted keys, or a selection of rows  s   unroll step, counted from 0
    p  the target's law                          q   the draft's law

The row convention, used by training and by decoding alike: row ``t`` at step ``s`` reads the feature anchored at
``t`` and the token ``x[t+1+s]``, predicts token ``x[t+2+s]``, is taught by the target's row ``t+1+s``, and sits at
rope position ``t+s`` of its document. :mod:`eagle3_lab.rows` does the shifting.

Layer ids are indices into Hugging Face's ``hidden_states``: 0 is the embedding, ``i < n`` the residual stream after
block ``i-1`` before any norm, and ``n`` the last state after the final norm.

This module imports nothing of ours, and knows neither transformers nor any method by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Carry = Tensor | tuple[Tensor, ...]
"""What a draft hands from one step to the next: rows on axis 1, otherwise the method's own."""

COLDEST = 1e-6
"""The lowest temperature that is not 0, greedy: divided by less, logits leave float32's range and a law becomes NaN."""

PADDING = -1
"""A parent, document or path index that stands for nothing."""


@dataclass(frozen=True)
class Batch:
    """Packed training rows: several documents (conversations) may share one row.

    ``ids`` int64 token ids; ``supervised`` True where the token was written by the target (its end token included);
    ``position`` counts from 0 within each document; ``document`` numbers the documents of a row from 0, PADDING where
    there is no token.
    """

    ids: Int[Tensor, "B T"]
    supervised: Bool[Tensor, "B T"]
    position: Int[Tensor, "B T"]
    document: Int[Tensor, "B T"]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in ("ids", "supervised", "position", "document")))


@dataclass(frozen=True)
class Needs:
    """What a consumer wants from a target's forward: hidden states by layer id, the top state, the logits."""

    layers: tuple[int, ...] = ()
    top: bool = False
    logits: bool = False

    def __or__(self, other: Needs) -> Needs:
        """Both wants; layers keep the first one's order, so a union is only read by layer id."""
        more = tuple(i for i in other.layers if i not in self.layers)
        return Needs(self.layers + more, self.top or other.top, self.logits or other.logits)


@dataclass(frozen=True)
class LogitSummary:
    """What is kept of rows of the target's logits where the logits themselves are not: ``argmax`` over all V target
    ids (lowest of equals), and ``log_sum``, the log of the sum of their exponentials (the log-normaliser)."""

    argmax: Int[Tensor, "*rows"]
    log_sum: Float[Tensor, "*rows"]


@dataclass(frozen=True)
class TargetOut:
    """Exactly what ``Needs`` named, for T rows: ``taps`` in the order of ``Needs.layers``, ``top`` after the final
    norm (EAGLE-1's feature, the head's input), ``logits`` before any law. ``summary``: of all T rows' logits, where
    they were made before (a feature store's); whoever has it needs no logits over the full vocabulary."""

    taps: tuple[Float[Tensor, "B T Dt"], ...] = ()
    top: Float[Tensor, "B T Dt"] | None = None
    logits: Float[Tensor, "B L V"] | None = None
    summary: LogitSummary | None = None


@dataclass(frozen=True)
class Rows:
    """Where draft rows stand. Training gives ``document``: a row sees the rows of its own document up to itself.
    Decoding gives ``visible``: which of the M uncommitted keys a row sees, itself included (committed keys are always
    seen)."""

    position: Int[Tensor, "B T"]
    document: Int[Tensor, "B T"] | None = None
    visible: Bool[Tensor, "B T M"] | None = None


@dataclass(frozen=True)
class DraftOut:
    """One draft step: ``head_in`` [B, T, H] is what the head reads, ``carry`` what the next step is fed."""

    head_in: Float[Tensor, "B T H"]
    carry: Carry


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of a target at some head width d: angles are ``position * inv_freq``, cos and sin are
    multiplied by ``scale`` (yarn's attention factor, else 1)."""

    inv_freq: Float[Tensor, " half"]
    scale: float = 1.0

    def cos_sin(self, position: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"]]:
        """Cosine and sine in float32, each half repeated (the rotate-half layout of Llama)."""
        angle = position[..., None].float() * self.inv_freq.to(position.device).float()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.scale, angle.sin() * self.scale


@dataclass(frozen=True)
class TargetSpec:
    """The sizes and identity of a target: enough to build a draft for it and to refuse one built for another."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rms_eps: float
    max_positions: int
    end_tokens: tuple[int, ...]
    weights_hash: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""
    vocabulary_hash: str = ""  # which text each token id stands for: all that a draft LM must share with its target
    settings_hash: str = ""  # of what the weights do not tell, such as the rotary embedding; "": not known
    tokens: int = 0  # ids that stand for a text, the first ones; the head's rows behind them are padding. 0: all do

    @property
    def real_vocab(self) -> int:
        """How many ids stand for a text: the rows of the head that are no padding."""
        return self.tokens or self.vocab


def plain_attributes(part: nn.Module) -> dict[str, object]:
    """Return the public attributes of a module that are numbers, words, null, or lists and tuples of them."""

    def is_plain(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(is_plain, value))
        return value is None or isinstance(value, bool | int | float | str)

    found = {name: value for name, value in vars(part).items() if not name.startswith("_") and is_plain(value)}
    return {name: value for name, value in sorted(found.items()) if name != "training"}


@dataclass(frozen=True)
class Tree:
    """Tokens to score in one target forward. Node 0 is the root (committed by the last round, not yet in the cache),
    with parent 0; a parent's index is below its child's; siblings are judged in index order, which is drawing order.

    ``candidate`` True: may be accepted. Padding has parent PADDING and candidate False and is seen by nobody;
    candidate False otherwise: scored for the proposer only. The root is a candidate.
    ``q`` row i is the law node i's children were drawn from, over target ids (0 outside the draft vocabulary); None:
    the candidates are fixed. ``replacement`` False: each child was drawn without its earlier siblings.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    candidate: Bool[Tensor, "B N"]
    q: Float[Tensor, "B N V"] | None = None
    replacement: bool = True

    def visible(self) -> Bool[Tensor, "B N N"]:
        """``[b, i, j]``: node i sees node j, i.e. j is i or one of its ancestors. Padding sees and is seen by nobody.

        root 0 with children 1 and 2, and 3 below 2:      1 0 0 0
                                                          1 1 0 0
                                                          1 0 1 0
                                                          1 0 1 1
        """
        nodes = self.tokens.shape[1]
        real = self.parents != PADDING
        if nodes == 1:
            return real[:, :, None]
        above = self.parents.clamp(min=0)
        reach = torch.eye(nodes, dtype=torch.bool, device=above.device).expand(len(above), nodes, nodes)
        for _ in range((nodes - 1).bit_length()):  # the nearest 1, 3, 7, ... ancestors
            reach = reach | reach.gather(1, above[:, :, None].expand(-1, -1, nodes))
            above = above.gather(1, above)
        return reach & real[:, :, None] & real[:, None, :]

    def depth(self) -> Int[Tensor, "B N"]:
        """Levels below the root: 0 for the root (and for padding)."""
        return (self.visible().sum(-1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Verdict:
    """What a round commits: ``path`` node indices, root first, PADDING behind the accepted ones; ``length`` accepted
    drafts, root not counted; ``bonus`` the target's own token after them. The round emits ``length + 1`` tokens."""

    path: Int[Tensor, "B A"]
    length: Int[Tensor, " B"]
    bonus: Int[Tensor, " B"]


@dataclass(frozen=True)
class Round:
    """One decoding round of one sequence: ``judged`` drafts on the walked path plus the one that failed,
    ``accepted`` drafts, ``emitted`` tokens after trimming at end token or length limit. ``overrun``: further drafts the
    verifier accepted beyond that trim (they count in a serving engine's tau, and in nothing of ours)."""

    judged: int
    accepted: int
    emitted: int
    overrun: int = 0


@dataclass(frozen=True)
class Decoded:
    """One sequence's answer: emitted token ids (prefill's first), its rounds, and why it ended
    ("end", "length" or "context"). ``seconds`` by stage: prefill, draft, verify, host."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    ended: str
    seconds: dict[str, float] = field(default_factory=dict)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_dtype(key: str, dtype: torch.dtype) -> None:
    """Refuse one in which no whole model computes: integers, complex numbers, eight bits. Raises ValueError."""
    if dtype not in DTYPES:
        legal = ", ".join(_name(one) for one in DTYPES)
        raise ValueError(f"{key} must be one of {legal}, got {_name(dtype)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
