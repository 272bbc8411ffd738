"""Interfaces of the parts that an experiment combines: target, draft, features, proposer, verifier, sampling.

Shapes use the letters of :mod:`eagle3_lab.types`, where the records that these parts exchange are defined. This module
knows neither transformers nor any method by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.kv_cache import KVCache
from eagle3_lab.types import (
    Batch,
    Carry,
    DraftOut,
    LogitSummary,
    Needs,
    Rotary,
    Rows,
    TargetOut,
    TargetSpec,
    Tree,
    Verdict,
    plain_attributes,
)


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


class TargetSession(Session):
    """A session of a loaded target, whose cache can be read and filled row by row."""

    cache: KVCache


class Target(FrozenTarget):
    """A loaded target: what a draft reads of it, its tokenizer, its states over packed rows, and decoding sessions."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:  # noqa: ANN401  transformers' tokenizer, whose type is known to the target's room alone
        """The tokenizer that goes with the model."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its embedding lies, and the tensors that it is given."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""

    @abstractmethod
    def features(self, batch: Batch, needs: Needs) -> TargetOut:
        """Return what ``needs`` names of every row of a packed batch: a row sees its own document up to itself."""

    @abstractmethod
    def read(self, batch: Batch, needs: Needs) -> TargetOut:
        """Return the same with the gradient of whatever asks for one: of nothing in a frozen model."""

    @abstractmethod
    def summary(self, top: Float[Tensor, "M Dt"]) -> LogitSummary:
        """Return arg-max and log-normaliser of M rows of logits, from the states after the final norm."""

    @abstractmethod
    def open(self, batch: int, capacity: int, needs: Needs) -> TargetSession:
        """Open a session for ``batch`` sequences of at most ``capacity`` positions, trees included."""
