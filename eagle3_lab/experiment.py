"""An experiment: every choice of a run, as one YAML names it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

# Parts are named in YAML by their class: a class that no import has brought in is no legal name.
import eagle3_lab.decode.grow
import eagle3_lab.decode.methods
import eagle3_lab.draft.layer
import eagle3_lab.draft.source
import eagle3_lab.draft.terms  # noqa: F401
from eagle3_lab.config import Config
from eagle3_lab.data.answers import Answers
from eagle3_lab.data.module import ConversationData
from eagle3_lab.evaluation import Evaluation
from eagle3_lab.target.load import TargetChoice
from eagle3_lab.tracking import Tracking
from eagle3_lab.train import Model, Optimization
from eagle3_lab.training import Training


@dataclass
class Experiment:
    """What is run. Built by :func:`eagle3_lab.load` or by the command line.

    Args:
        name: of the experiment; runs of one name are compared in one MLflow experiment.
        target: the model to make faster.
        data: the conversations to train on.
        model: the draft's parts.
        optimizer: AdamW and its schedule.
        trainer: Lightning's options.
        answers: prompts that the target answers before training, beside ``data``.
        evaluate: what is measured by decoding, after training or by ``evaluate``.
        budgets: seconds each stage is meant to take (target, answers, training, evaluation); shown, never enforced.
        tracking: where runs are kept.
        seed: of weights, order and draws.
        config: the checked configuration, set when built from a YAML.
    """

    name: str
    target: TargetChoice
    data: ConversationData
    model: Model
    optimizer: Optimization
    trainer: Training
    answers: Answers | None = None
    evaluate: Evaluation | None = None
    budgets: dict[str, float] = field(default_factory=dict)
    tracking: Tracking = field(default_factory=Tracking)
    seed: int = 0
    config: Config | None = None

    def training_key(self, *parts: str) -> str:
        """Identity of a trained head: nothing that only names, shows or measures it."""
        return self.key(*parts, without=("name", "tracking", "budgets", "evaluate", "answers"))

    def key(self, *parts: str, without: tuple[str, ...] = ()) -> str:
        """Identity of a stage's outcome: the configuration but for top-level keys that do not touch it, and what else
        decides it."""
        plain = {} if self.config is None else {k: v for k, v in self.config.plain.items() if k not in without}
        text = json.dumps([plain, *parts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
