"""An experiment: every choice of a run, as one YAML names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Parts are named in YAML by their class: a class that no import has brought in is no legal name.
import eagle3_lab.data.sources.hub
import eagle3_lab.data.sources.prompt_files
import eagle3_lab.data.sources.self_written
import eagle3_lab.decode.auto_tree
import eagle3_lab.decode.methods
import eagle3_lab.decode.tree_shapes
import eagle3_lab.decode.typical
import eagle3_lab.draft.attention.hass
import eagle3_lab.draft.draft_lm
import eagle3_lab.draft.eagle1
import eagle3_lab.draft.eagle3
import eagle3_lab.draft.features
import eagle3_lab.draft.hydra
import eagle3_lab.draft.medusa
import eagle3_lab.draft.noise
import eagle3_lab.draft.unroll
import eagle3_lab.training.loss.lk
import eagle3_lab.training.loss.terms  # noqa: F401
from eagle3_lab import config as configuration
from eagle3_lab.config import Config
from eagle3_lab.config.key_options import OPTIONS
from eagle3_lab.config.keys import Content, digest, reduced
from eagle3_lab.data.feature_store.features import Features
from eagle3_lab.data.generation.answers import Answers
from eagle3_lab.data.generation.preparation import Preparation
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.records import file_hash
from eagle3_lab.engine import Engine
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.runner import Evaluation
from eagle3_lab.target_model.loading import TargetChoice, model_hash
from eagle3_lab.tracking.params import flatten
from eagle3_lab.tracking.run import Tracking
from eagle3_lab.training.options import Model, Optimization
from eagle3_lab.training.trainer import Training

LONGEST_NAME = 120
"""Of an experiment, in bytes: it begins a folder's name, which file systems limit to 255."""

SHOWN = ("name", "tracking", "budgets")
"""Keys that are no parameters of a run: they only name or show."""


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
        engine: where `evaluate` serves target and head instead of decoding itself; null: nowhere.
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
    engine: Engine | None = None
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
        return {key: value for key, value in self._plain().items() if key not in SHOWN}

    def training_key(self, contents: Mapping[str, object]) -> str:
        """Identity of a trained head: the options that decide it, and ``contents``, by name what others lead to, such
        as the data's hash. Raises UserError as `choices`."""
        return digest(reduced(self._tree(), training_keys(self._plain())), dict(contents))

    def training_options(self) -> dict[str, dict[str, str]]:
        """The options that decide a trained head, "by value" and "by content", as parameters: to tell two trainings
        apart. Raises UserError as `choices`."""
        keys, tree = training_keys(self._plain()), self._tree()
        values, every = (flatten(reduced(tree, keys, of)["init_args"]) for of in (None, AS_WRITTEN))
        return {BY_VALUE: values, BY_CONTENT: {key: value for key, value in every.items() if key not in values}}

    def evaluation_key(self, contents: Mapping[str, object]) -> str:
        """Identity of measured methods: the options that decide answers and seconds, and ``contents``, by name what
        others lead to: the head, the target, the prompts. Raises UserError as `choices`."""
        tree = self._tree()
        target = reduced(tree["init_args"].pop("target"), ("evaluation",))  # whose files are known by their hashes
        return digest(reduced(tree, ("evaluation",), FILES), target, dict(contents))

    def _tree(self) -> dict[str, Any]:
        return {"class_path": f"{Experiment.__module__}.{Experiment.__qualname__}", "init_args": self._plain()}

    def _plain(self) -> dict[str, Any]:
        if self.config is None:
            raise UserError(
                f"experiment {self.name}: was built without a configuration, so nothing would tell its results from "
                "another's; build it with eagle3_lab.load"
            )
        return self.config.plain


def training_keys(choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of `key_options` that decide a trained head. ``choices``: as of `Config.plain`. Validation
    decides no weight but through a callback that reads it."""
    trainer = choices.get("trainer") or {}
    watched = trainer.get("init_args", trainer).get("callbacks")
    return ("training", "validation") if watched else ("training",)


BY_VALUE, BY_CONTENT = "by value", "by content"

FILES: dict[str, Content] = {"AutoTree.measured": file_hash, "TargetChoice.model": model_hash}
"""What the files lead to that an evaluation's methods name: measured costs, and a draft LM's folder."""

AS_WRITTEN: dict[str, Content] = {
    f"{cls}.{option}": str for cls, options in OPTIONS.items() for option in options if options[option].contents
}


def load(path: Path | str, *overrides: str) -> Experiment:
    """Read, check and build an experiment: `load("experiments/eagle3.yaml", "model.unroll.depth=3")`.

    Raises:
        ConfigError: one line, for a mistake in the file or an override.
    """
    return configuration.load(path, *overrides, into=Experiment)
