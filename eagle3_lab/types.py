"""The words of the lab: letters, frozen records between parts, and the parts' interfaces.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Carry = Tensor | tuple[Tensor, ...]
"""What a draft hands from one step to the next: rows on axis 1, otherwise the method's own."""

COLDEST = 1e-6
"""The lowest temperature that is not 0, greedy: divided by less, logits leave float32's range and a law becomes NaN."""

PADDING = -1
"""A parent, document or path index that stands for nothing."""


# ----------------------------------------------------------------------------------------------------- training side


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


class FrozenTarget(ABC):
    """The target as a draft sees it: sizes, embedding, head, rotary. Nothing here carries a gradient."""

    spec: TargetSpec

    @abstractmethod
    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows Dt"]:
        """The target's input embedding of token ids."""

    @abstractmethod
    def logits(self, top: Float[Tensor, "*rows Dt"]) -> Float[Tensor, "*rows V"]:
        """The target's head as a function of its top state: bias, scale and soft cap included."""

    def head_over(self, ids: Int[Tensor, " Vd"]) -> Callable[[Tensor], Tensor]:
        """The head over some target ids alone, as a function of the top state [*rows, Dt]: ``logits(top)[..., ids]``.
        A target that can do it for less than all V overrides this."""
        return lambda top: self.logits(top)[..., ids]

    @abstractmethod
    def head_rows(self, ids: Int[Tensor, " M"]) -> Float[Tensor, "M Dt"]:
        """Rows of the head's weight matrix, by target id."""

    @abstractmethod
    def rotary(self, head_dim: int | None = None) -> Rotary:
        """The target's rotary embedding, at its own head width or at another one."""

    def first_layers(self, count: int, *, train_embedding: bool = False) -> LanguageModel:
        """A language model of the target's embedding, first ``count`` blocks, final norm and head, to be trained: the
        blocks and the norm are copies; embedding and head are copies where they are trained, else the target's own.

        Raises:
            ValueError: ``count`` outside 1 .. the target's blocks, or a target whose blocks are not at hand.
        """
        raise ValueError(f"{self.spec.name} has no blocks at hand to make a language model of")


class Context(ABC):
    """The keys that draft rows attend to, and how: an unroll's keys in training, a cache's in decoding. One object
    serves one pass over the draft's layers and steps, so a layer never asks where it runs."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[Tensor, "B heads T d"],
        k: Float[Tensor, "B kv_heads T d"],
        v: Float[Tensor, "B kv_heads T d"],
        rows: Rows,
    ) -> Float[Tensor, "B heads T d"]:
        """Store these rows' keys and values for ``layer`` and attend to every key the rows may see."""

    def check(self, document: Int[Tensor, "B T"]) -> None:
        """Tell before training that rows of these documents cannot be served. Raises UserError; most serve all."""


def plain_attributes(part: nn.Module) -> dict[str, object]:
    """Return the public attributes of a module that are numbers, words, null, or lists and tuples of them."""

    def is_plain(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(is_plain, value))
        return value is None or isinstance(value, bool | int | float | str)

    found = {name: value for name, value in vars(part).items() if not name.startswith("_") and is_plain(value)}
    return {name: value for name, value in sorted(found.items()) if name != "training"}


class FeatureSource(nn.Module, ABC):
    """Turns the target's hidden states into the draft's first carry; owns its projection."""

    @abstractmethod
    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The layer ids to tap in a target of ``num_layers`` blocks. Raises ValueError where there are none."""

    @abstractmethod
    def build(self, target: FrozenTarget) -> int:
        """Create the parameters for this target, once; returns the width D of the features."""

    @abstractmethod
    def forward(self, taps: tuple[Float[Tensor, "B T Dt"], ...]) -> Float[Tensor, "B T D"]:
        """Features of T rows."""

    def options(self) -> dict[str, object]:
        """Return, once built, what decides this part's function beside its weights: by option, as numbers, words, null
        and lists of them. What the target decided is resolved, so that equal options are equal functions.

        A checkpoint keeps them, and a head is loaded only into parts of the same. By default they are the part's plain
        public attributes.
        """
        return plain_attributes(self)


class DraftModel(nn.Module, ABC):
    """A draft head: from a carry and the next tokens to the next carry and to draft logits. ``steps``: how many steps
    ahead it can draft; None: any number."""

    steps: int | None = None

    @abstractmethod
    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        """Create the parameters, once. ``width`` is the source's D, ``vocab`` the kept target ids, ascending."""

    @abstractmethod
    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        """The carry that step 0 reads."""

    @abstractmethod
    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        """One step: ``ids[t]`` is the token ``x[t+1+s]`` of row t."""

    @abstractmethod
    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        """Draft logits, over the draft vocabulary, of selected rows of step ``s``."""

    @property
    @abstractmethod
    def vocab(self) -> Int[Tensor, " Vd"]:
        """The kept target ids, ascending: draft id i means target id ``vocab[i]``."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many attention layers write keys to a context."""

    def options(self) -> dict[str, object]:
        """Return, once built, what decides this part's function beside its weights: by option, as numbers, words, null
        and lists of them. What the target decided is resolved, so that equal options are equal functions.

        A checkpoint keeps them, and a head is loaded only into parts of the same. By default they are the part's plain
        public attributes.
        """
        return plain_attributes(self)


class LanguageModel(nn.Module, ABC):
    """A causal language model that is trained, then drafts: it reads token ids, and no state of a target. Its
    parameters are what is trained and saved; ``spec`` are its own sizes."""

    spec: TargetSpec

    @abstractmethod
    def forward(self, batch: Batch) -> Float[Tensor, "B T D"]:
        """States after the final norm of packed rows, with gradient; a row sees its own document up to itself."""

    @abstractmethod
    def logits(self, top: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """The head as a function of those states."""

    @abstractmethod
    def open(self, batch: int, capacity: int, needs: Needs) -> Session:
        """A session that decodes ``batch`` sequences of at most ``capacity`` positions with the present weights."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it and the target's tokenizer as an ordinary Hugging Face folder, whole or not at all. Raises UserError
        where something of that name is there, or it cannot be written."""


class CausalDraft(DraftModel, ABC):
    """A draft that is a language model of its own: it takes no steps, since it reads whole text at once in training
    and decodes in a session like a target's."""

    lm: LanguageModel

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        raise AssertionError("a language model takes no steps: whoever runs a draft step by step refuses it first")

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        raise AssertionError("a language model takes no steps: whoever runs a draft step by step refuses it first")


# ----------------------------------------------------------------------------------------------------- decoding side


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


class Session(ABC):
    """One target decoding B sequences: a cache that grows by committed paths."""

    lengths: Int[Tensor, " B"]

    @abstractmethod
    def prefill(self, ids: Int[Tensor, "B L"], lengths: Int[Tensor, " B"]) -> TargetOut:
        """Read right-padded prompts. Taps and top come for all L rows, logits [B, 1, V] for each last real row."""

    @abstractmethod
    def score(self, tree: Tree, done: int = 0) -> TargetOut:
        """One forward over nodes ``done`` .. N-1: each sees the committed tokens and its own path. Logits
        [B, N - done, V]. The nodes before ``done`` were scored since the last commit, as the beginning of this tree."""

    @abstractmethod
    def commit(self, verdict: Verdict) -> None:
        """Keep the last scored tree's accepted path (root first) in the cache, drop everything else of it."""


class Proposer(ABC):
    """Proposes token trees. Knows nothing of the target but what ``needs`` names.

    ``nodes`` is N, fixed for the proposer's life. ``positions`` is how many positions it can draft at (None: no limit).
    """

    needs: Needs = Needs()
    nodes: int = 1
    positions: int | None = None

    @abstractmethod
    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Begin new sequences: right-padded prompts and what the target said of them. ``capacity`` bounds the
        positions that will ever be written; ``generators``, one a row, are the only randomness allowed."""

    @abstractmethod
    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        """The next tree below ``root``, the token committed last."""

    @abstractmethod
    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        """Learn what the target kept: ``out`` holds rows of ALL nodes, accepted or not."""


class Law(ABC):
    """From logits to the law tokens are drawn from: penalties, temperature, filters. Vanilla uses it with N = 1."""

    @abstractmethod
    def probs(self, logits: Float[Tensor, "B N V"], ids: Int[Tensor, "B L"], tree: Tree) -> Float[Tensor, "B N V"]:
        """p of every node. ``ids`` are the committed tokens, PADDING behind each row's end, the root not among them;
        node i's context is those, then its path from the root to itself, each once."""

    def certain(self, logits: Float[Tensor, "B N V"], ids: Int[Tensor, "B L"], tree: Tree) -> Int[Tensor, "B N"] | None:
        """The one token of probability 1 at every node, where the law leaves no choice; None: ask for `probs`."""
        return None

    def __init_subclass__(cls, **given: object) -> None:
        """A law that says anew what p is has no certainty but what it says itself."""
        super().__init_subclass__(**given)
        if "probs" in vars(cls) and "certain" not in vars(cls):
            cls.certain = Law.certain


class Verifier(ABC):
    """Judges a tree against p. ``lossless`` False must be shown wherever its numbers are shown. ``judges_drawn``: it
    takes trees with a law q too."""

    lossless: bool = True
    judges_drawn: bool = True

    @abstractmethod
    def __call__(self, p: Float[Tensor, "B N V"], tree: Tree, generators: Sequence[torch.Generator]) -> Verdict:
        """The verdict; row b draws from ``generators[b]`` alone."""

    def follow(self, choice: Int[Tensor, "B N"], tree: Tree) -> Verdict | None:
        """The verdict where p is 1 at ``choice`` of every node and nothing is left to chance; None: it must be asked
        with p. The same verdict, without a law of V numbers for every node."""
        return None


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
