"""Decoding methods as an experiment names them: each makes a proposer for a target, and a trained head where it needs
one. A new method is a new class here or anywhere a YAML can name it; nothing else knows its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from eagle3_lab.backend.cuda_graphs import Record
from eagle3_lab.backend.prepacked_linear import packed
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.lookahead import Lookahead as LookaheadProposer
from eagle3_lab.decode.propose.pld import PromptLookup as PromptLookupProposer
from eagle3_lab.decode.propose.sps import Lengths, SpeculativeSampling
from eagle3_lab.decode.propose.vanilla import Vanilla as VanillaProposer
from eagle3_lab.decode.sampled_trees import DrawnTree, require_drawn
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Grow
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.interfaces import CausalDraft, DraftModel, FeatureSource, LanguageModel, Proposer, Verifier
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import Needs, TargetSpec


@dataclass(frozen=True)
class Head:
    """A trained draft head and the source of its features, on the target's device. ``record``: the target's own, where
    forwards are recorded."""

    source: FeatureSource
    draft: DraftModel
    record: Record | None = None


def named_head(name: str | None) -> str | None:
    """An experiment's name as a method gives it. Raises ValueError for an empty one."""
    if name is not None and not name.strip():
        raise ValueError(f"head must name an experiment, such as experiments/eagle, or be null, got {name!r}")
    return name


class Method(ABC):
    """One way of proposing. ``levels``: how many drafts deep its rounds can accept; ``needs_head``: whether it
    proposes with a trained head, and ``head`` then names the experiment that trained it, None for the one at hand."""

    needs_head: bool = False
    head: str | None = None
    verifier: Verifier = ExactVerifier()
    """How its trees are judged: losslessly, unless a method says otherwise and is shown as lossy."""

    @property
    def needs_own_head(self) -> bool:
        """Whether the experiment at hand must have trained the head."""
        return self.needs_head and self.head is None

    @property
    @abstractmethod
    def levels(self) -> int: ...

    @abstractmethod
    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        """A proposer for this target. Raises ValueError for a method that needs a head without one."""


class Vanilla(Method):
    """Plain decoding, one token a forward: what everything else is compared with."""

    @property
    def levels(self) -> int:
        return 0

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        return VanillaProposer()


class HeadTree(Method):
    """A trained head that grows a tree (a chain is the narrowest one).

    Args:
        grow: the tree's shape.
        verifier: how the tree is judged; null: losslessly. Medusa's and Hydra's papers judge by `TypicalVerifier`.
        head: whose trained head it is: an experiment without its ending, such as ``experiments/eagle``; null: this
            experiment's own.
        law: what a node's children are drawn from in a chain or a static tree, without penalties; null, or at
            temperature 0: its likeliest tokens, not drawn. It may differ from the law that is measured under.
        replacement: siblings are drawn from the whole law and may repeat; false: each without those before it.

    Raises ValueError for a law that these parts cannot draw from, and ``replacement`` without one.
    """

    needs_head = True

    def __init__(
        self,
        grow: Grow,
        verifier: Verifier | None = None,
        head: str | None = None,
        law: SamplingLaw | None = None,
        replacement: bool = False,
    ) -> None:
        self.grow, self.head = grow, named_head(head)
        self.verifier = verifier or ExactVerifier()
        self.law, self.replacement = law, replacement
        if grow.draws:
            raise ValueError(f"grow must be a shape, and law what is drawn from it, got {type(grow).__name__}")
        if law is not None:
            require_drawn(law, grow, self.verifier)
        elif replacement:
            raise ValueError("replacement says how siblings are drawn from law, and law is null")

    @property
    def levels(self) -> int:
        return self.grow.levels

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        if head is None:
            raise ValueError(f"{type(self.grow).__name__} is grown by a trained head, and there is none")
        if isinstance(head.draft, CausalDraft):
            raise ValueError(f"HeadTree reads features, and {type(head.draft).__name__} does not; use DraftLM")  # noqa: TRY004
        source, draft = packed(head.source), packed(head.draft)  # twins: the head may be one that is yet to be trained
        return Eagle(source, draft, self._growing(spec.vocab), spec.layers, spec.max_positions, head.record)

    def _growing(self, vocab: int) -> Grow:
        if self.law is None or self.law.temperature == 0:
            return self.grow
        return DrawnTree(self.grow.require_drawable(), self.law, vocab, self.replacement)


class PromptLookup(Method):
    """Copies what followed the last tokens where they stood before in prompt or answer; no model drafts.

    The defaults are Spec-Bench's.

    Args:
        max_ngram: longest run of last tokens that is looked up; shorter ones where it is not found.
        length: drafts a round, at most.
        full: an occurrence counts only if ``length`` tokens follow it (Spec-Bench); false: one is enough, as in
            transformers.
    """

    def __init__(self, max_ngram: int = 3, length: int = 10, full: bool = True) -> None:
        PromptLookupProposer(max_ngram, length, full)  # a wrong value is told when the YAML is read
        self.max_ngram, self.length, self.full = max_ngram, length, full

    @property
    def levels(self) -> int:
        return self.length

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        return PromptLookupProposer(self.max_ngram, self.length, self.full)


class Lookahead(Method):
    """The target's own parallel guesses, tried when their first token comes up; no model drafts.

    The defaults are the public code's for its examples, and Spec-Bench's. A round scores
    ``(window + guesses) * (ngram - 1)`` nodes.

    Args:
        window: columns of the window that rides along (W).
        ngram: tokens of an n-gram, the one it is found by included (N); a round accepts N - 1 drafts at most.
        guesses: n-grams kept for each first token, and tried at most (G).
        follows: accepted drafts move the window's columns on, so that its tokens keep their positions; false: one
            position a round, as in the public code.
    """

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7, follows: bool = False) -> None:
        LookaheadProposer(window, ngram, guesses)  # a wrong value is told when the YAML is read
        self.window, self.ngram, self.guesses, self.follows = window, ngram, guesses, follows

    @property
    def levels(self) -> int:
        return self.ngram - 1

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        return LookaheadProposer(self.window, self.ngram, self.guesses, self.follows, spec.end_tokens)


class DraftLM(Method):
    """A second language model drafts a chain (speculative sampling, SpS).

    Args:
        target: the draft model, chosen like a target (`capture` too) and loaded when it is asked to propose; its
            tokenizer's ids must mean what the target's do. null: a language model that an experiment trained.
        head: which one: an experiment without its ending, such as ``experiments/sps``; null: this one.
        length: drafts in the first round.
        adaptive: two drafts more after a round that accepted all, one less after any other; false: always ``length``.
        max_length: most drafts a round where adaptive; the tree's size is fixed by it.
        law: what drafts are drawn from, without penalties; null: the draft's likeliest token, not drawn. It may differ
            from the law that is measured under; most drafts are accepted where both are alike.
    """

    def __init__(
        self,
        target: TargetChoice | None = None,
        length: int = 5,
        adaptive: bool = True,
        max_length: int = 12,
        law: SamplingLaw | None = None,
        head: str | None = None,
    ) -> None:
        if target is not None and head is not None:
            raise ValueError(f"head {head!r} names who trained the draft model, and target another one; give one")
        self.target, self.law, self.head = target, law or SamplingLaw(), named_head(head)
        self.lengths = Lengths(length, adaptive, max_length)
        self.needs_head = target is None

    @property
    def levels(self) -> int:
        return self.lengths.most

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        """Raises ValueError where a loaded draft model's token ids mean other texts than the target's, or where the
        trained head is no language model."""
        draft = self._trained(head) if self.target is None else self._loaded(self.target, spec)
        return SpeculativeSampling(
            lambda rows, capacity: draft.open(rows, capacity, Needs(logits=True)),
            vocab=draft.spec.vocab,
            target_vocab=spec.vocab,
            max_positions=draft.spec.max_positions,
            lengths=self.lengths,
            law=self.law,
        )

    def _trained(self, head: Head | None) -> LanguageModel:
        by = "this experiment" if self.head is None else self.head
        if head is None or not isinstance(head.draft, CausalDraft):
            held = "no head" if head is None else type(head.draft).__name__
            raise ValueError(
                f"target null means a draft language model that {by} trained, which trained {held}; name a model, or "
                "use HeadTree"
            )
        return head.draft.lm

    @staticmethod
    def _loaded(target: TargetChoice, spec: TargetSpec) -> HFTarget:
        draft = target.load()
        if draft.spec.vocabulary_hash != spec.vocabulary_hash:
            raise ValueError(
                f"target.model: {draft.spec.name!r} has another vocabulary than {spec.name!r}; "
                "a draft model must share its target's tokenizer"
            )
        return draft
