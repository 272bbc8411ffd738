"""An experiment: every choice of a run, as one YAML names it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

# Parts are named in YAML by their class: a class that no import has brought in is no legal name.
import eagle3_lab.data.hub
import eagle3_lab.data.prompt_files
import eagle3_lab.data.self_written
import eagle3_lab.decode.grow
import eagle3_lab.decode.methods
import eagle3_lab.draft.eagle1
import eagle3_lab.draft.layer
import eagle3_lab.draft.multiplicative
import eagle3_lab.draft.noise
import eagle3_lab.draft.source
import eagle3_lab.draft.terms  # noqa: F401
from eagle3_lab.config import Config
from eagle3_lab.data.answers import Answers
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.preparation import Preparation
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation import Evaluation
from eagle3_lab.target.load import TargetChoice
from eagle3_lab.tracking import Tracking
from eagle3_lab.train import Model, Optimization
from eagle3_lab.training import Training

SHOWN = ("name", "tracking", "budgets")
"""Keys that no result depends on."""


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
        prepare: prompts that the target answers first, into the conversations that ``data.path: prepared`` reads.
        evaluate: what is measured by decoding, after training or by ``evaluate``.
        budgets: seconds each stage is meant to take (target, answers, training, evaluation); shown, never enforced.
        tracking: where runs are kept.
        seed: of the weights and of what is drawn in training; the order of the data is ``data.seed``'s.
        config: the checked configuration, set when built from a YAML.
    """

    name: str
    target: TargetChoice
    data: ConversationData
    model: Model
    optimizer: Optimization
    trainer: Training
    answers: Answers | None = None
    prepare: Preparation | None = None
    evaluate: Evaluation | None = None
    budgets: dict[str, float] = field(default_factory=dict)
    tracking: Tracking = field(default_factory=Tracking)
    seed: int = 0
    config: Config | None = None

    def named_tracking(self) -> Tracking:
        """Where runs are kept; a run without a name of its own is called by the experiment's."""
        return replace(self.tracking, run_name=self.tracking.run_name or self.name)

    def choices(self) -> dict[str, Any]:
        """The configuration but for what only names or shows: what a run's parameters are.

        Raises:
            UserError: built without a YAML.
        """
        if self.config is None:
            raise UserError(
                f"experiment {self.name}: was built without a configuration, so nothing would tell its results from "
                "another's; build it with eagle3_lab.load"
            )
        return {key: value for key, value in self.config.plain.items() if key not in SHOWN}

    def training_key(self, *parts: str) -> str:
        """Identity of a trained head: nothing that only names, shows or measures it. ``parts`` is what else decides it,
        such as the data's hash. Raises UserError as `choices`."""
        trained = {key: value for key, value in self.choices().items() if key not in ("evaluate", "answers", "prepare")}
        return _digest(trained, *parts)

    def result_key(self, *parts: str) -> str:
        """Identity of a trained and measured head. Raises UserError as `choices`."""
        return _digest(self.choices(), *parts)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
