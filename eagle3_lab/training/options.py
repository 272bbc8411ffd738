"""The `model:` and `optimizer:` parts of an experiment: what is trained, and how its weights move.

Apart from the module that trains, so that an experiment is checked without importing Lightning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from eagle3_lab.draft.noise import FeatureNoise
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.rows import Edge, Mask
from eagle3_lab.training.loss.teacher import Oov
from eagle3_lab.training.loss.terms import FeatureTerm, RowTerm, StepTerm
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.types import TargetSpec


@dataclass(frozen=True)
class Model:
    """What is trained, in interchangeable parts: this is where one line of YAML is one scientific difference.

    Args:
        features: which hidden states of the target the draft reads.
        draft: the head.
        unroll: how many steps ahead it is run in training, and what gradient flows between them.
        losses: the terms, each with its weight.
        step_decay: the loss of step s weighs ``step_decay ** s``.
        draft_vocab: how many target ids the draft can say (the most common of the training answers); null is every one
            that stands for a text.
        mask: which rows count: ``drafted`` (a decoder could draft them), ``official``, ``root``.
        edge: whether ``official`` counts the row whose teacher lies past the text.
        oov: what is taught where the target's choice is outside the draft vocabulary.
        reduction: a step's loss is averaged over ``supervised`` rows, or over ``all``.
        budget_mib: memory, in MiB, of head and loss, gradients included: how many rows are worked off together, never
            what comes out; null: all at once. Laws and logits get at least an eighth of it.
        compile: let torch compile what lies between a training step's products (in the draft's layers and attention,
            and where logits meet laws), once, in a minute or so: faster from then on, equal but for rounding. Needs a
            compiler (for C++ on a CPU).
        noise: disturbs the states that the draft reads, in training; null: none.
        start: a head of the same parts to go on from, its draft vocabulary included: the experiment that trained it,
            without its ending, such as ``experiments/hass``, or a ``draft.ckpt``; null:
            weights drawn from the seed.
        public: a public EAGLE-3 head to go on from instead, or to measure as it is: a folder or hub id in the layout of
            EAGLE, SpecForge or SGLang.

    Raises:
        ValueError: a draft vocabulary of no token, or two beginnings.
    """

    features: FeatureSource
    draft: DraftModel
    unroll: Unroll
    losses: list[RowTerm | StepTerm | FeatureTerm]
    step_decay: float = 0.8
    draft_vocab: int | None = None
    mask: Mask = "drafted"
    edge: Edge = "dropped"
    oov: Oov = "drop"
    reduction: Literal["supervised", "all"] = "supervised"
    noise: FeatureNoise | None = None
    start: Path | None = None
    budget_mib: int | None = 256
    compile: bool = False
    public: str | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.public is not None:
            raise ValueError(f"model.start is {self.start} and model.public {self.public!r}: leave one out")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ValueError(f"draft_vocab must be >= 1, or null for every token, got {self.draft_vocab}")

    def vocabulary_size(self, spec: TargetSpec) -> int:
        """Return how many target ids the draft can propose."""
        return spec.real_vocab if self.draft_vocab is None else self.draft_vocab

    def loss(self) -> UnrolledLoss:
        """The loss these options describe. Raises ValueError for options that contradict each other."""
        return UnrolledLoss(
            terms=self.losses,
            step_decay=self.step_decay,
            mask=self.mask,
            edge=self.edge,
            oov=self.oov,
            reduction=self.reduction,
            budget_mib=self.budget_mib,
        )


MOST_LR = 1000
"""AdamW moves every weight by about this much in a step: anything larger is a slip, and overflows further on."""


@dataclass(frozen=True)
class Optimization:
    """AdamW with linear warm-up, then decay to ``final`` of the peak at the last step.

    Args:
        lr: peak learning rate.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        warmup: share of all steps spent warming up.
        decay: shape of the way down.
        final: share of ``lr`` left at the end.
    """

    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.05
    decay: Literal["linear", "cosine", "constant"] = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr <= MOST_LR:  # nor NaN
            raise ValueError(f"optimizer.lr must be > 0 and at most {MOST_LR}, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay must be >= 0, got {self.weight_decay}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optimizer.warmup must be in [0, 1), a share of all steps, got {self.warmup}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"optimizer.final must be in [0, 1], a share of lr, got {self.final}")

    def adamw(self, module: nn.Module) -> torch.optim.AdamW:
        """AdamW at the peak rate over what ``module`` trains; fused, as the plain one copies each weight twice on its
        way, which for a head of a whole vocabulary is more than the loss takes."""
        decayed = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        made = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        # A fused one can unscale gradients itself, and beside that Lightning refuses to clip them; this one is not to.
        made._step_supports_amp_scaling = False
        return made

    def share(self, step: int, total: int) -> float:
        """Of the peak rate, at optimizer step ``step`` (from 0) of ``total``."""
        warm = max(1, round(self.warmup * total))
        if step < warm:
            return (step + 1) / warm
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - warm) / max(1, total - warm))
        falling = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * falling
