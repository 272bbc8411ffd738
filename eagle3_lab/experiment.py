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
import eagle3_lab.decode.auto
import eagle3_lab.decode.choices
import eagle3_lab.decode.grow
import eagle3_lab.decode.methods
import eagle3_lab.decode.typical
import eagle3_lab.draft.eagle1
import eagle3_lab.draft.first_layers
import eagle3_lab.draft.hydra
import eagle3_lab.draft.layer
import eagle3_lab.draft.lk
import eagle3_lab.draft.medusa
import eagle3_lab.draft.multiplicative
import eagle3_lab.draft.next_token
import eagle3_lab.draft.noise
import eagle3_lab.draft.source
import eagle3_lab.draft.terms  # noqa: F401
from eagle3_lab.config import Config
from eagle3_lab.data.answers import Answers
from eagle3_lab.data.features import Features
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.preparation import Preparation
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation import Evaluation
from eagle3_lab.options import Model, Optimization
from eagle3_lab.target.load import TargetChoice
from eagle3_lab.tracking import Tracking
from eagle3_lab.training import Training

LONGEST_NAME = 120
"""Of an experiment, in bytes: it begins a folder's name, which file systems limit to 255."""

SHOWN = ("name", "tracking", "budgets")
"""Keys that no result depends on."""

MEASURED = ("answers", "evaluate", "judged_depth", "prepare")
"""Keys that no trained weight depends on, but for what the data's own hash tells."""


@dataclass
class Experiment:
    """What is run. Built by :func:`eagle3_lab.load` or by the command line.

    An experiment that trains nothing needs ``target`` and ``evaluate`` alone, and ``data`` where it asks held-out
    prompts.

    Args:
        name: of the experiment; runs of one name are compared in one MLflow experiment.
        target: the model to make faster.
        data: the conversations to train on.
        model: the draft's parts.
        optimizer: AdamW and its schedule.
        answers: prompts that the target answers before training, beside ``data``.
        features: keep the target's features on disk and train from there; null: the target runs along.
        prepare: prompts that the target answers first, into the conversations that ``data.path: prepared`` reads.
        evaluate: what is measured by decoding, after training or by ``evaluate``.
        trainer: Lightning's options.
        judged_depth: how many drafts deep the hit table judges a head, in validation and at the end, whatever depth it
            was trained for: readings of two experiments compare where this is the same.
        budgets: seconds each stage is meant to take (target, answers, features, training, evaluation); shown, never
            enforced.
        tracking: where runs are kept.
        seed: of the weights and of what is drawn in training; the order of the data is ``data.seed``'s.
        config: the checked configuration, set when built from a YAML.
    """

    name: str
    target: TargetChoice
    data: ConversationData | None = None
    model: Model | None = None
    optimizer: Optimization | None = None
    answers: Answers | None = None
    features: Features | None = None
    prepare: Preparation | None = None
    evaluate: Evaluation | None = None
    trainer: Training | None = None  # behind the others: its schema takes seconds to import
    judged_depth: int = 7
    budgets: dict[str, float] = field(default_factory=dict)
    tracking: Tracking = field(default_factory=Tracking)
    seed: int = 0
    config: Config | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be within 0 .. 2**63 - 1, got {self.seed}")
        if len(self.name.encode()) > LONGEST_NAME:
            raise ValueError(f"name must be of at most {LONGEST_NAME} bytes, got {len(self.name.encode())}")
        if not self.name or not self.name.isprintable() or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name must be usable as a folder's name (no / and no line break), got {self.name!r}")
        if self.judged_depth < 1:
            raise ValueError(f"judged_depth must be >= 1, got {self.judged_depth}")

    def lacks(self) -> list[str]:
        """The sections without which no head can be trained, as far as they are missing."""
        needed = {"data": self.data, "model": self.model, "optimizer": self.optimizer, "trainer": self.trainer}
        return [key for key, section in needed.items() if section is None]

    def require_training(self, verb: str) -> tuple[ConversationData, Model, Optimization, Training]:
        """The sections that a head is trained with. Raises UserError where one is missing, which ``verb`` needs."""
        data, model, optimizer, trainer = self.data, self.model, self.optimizer, self.trainer
        if data is None or model is None or optimizer is None or trainer is None:
            raise UserError(
                f"{verb}: the experiment has no {', no '.join(self.lacks())}; add what a head is trained with"
            )
        return data, model, optimizer, trainer

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
        chosen = {key: value for key, value in self.config.plain.items() if key not in SHOWN}
        if self.features is not None:  # where they are kept and how they are read decides nothing, and may change
            chosen["features"] = {"dtype": self.features.dtype, "layers": self.features.layers}
        return chosen

    def training_key(self, *parts: str) -> str:
        """Identity of a trained head: nothing that only names, shows or measures it. ``parts`` is what else decides it,
        such as the data's hash. Raises UserError as `choices`."""
        trained = {key: value for key, value in self._decisive().items() if key not in MEASURED}
        return _digest(trained, *parts)

    def result_key(self, *parts: str) -> str:
        """Identity of a trained and measured head. Raises UserError as `choices`."""
        return _digest(self._decisive(), *parts)

    def _decisive(self) -> dict[str, Any]:
        """The choices that results depend on: of kept features the dtype alone, and nothing where none are kept."""
        choices = {key: value for key, value in self.choices().items() if key != "features"}
        return choices if self.features is None else choices | {"features": self.features.dtype}


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
