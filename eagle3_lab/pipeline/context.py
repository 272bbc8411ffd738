"""The run context: everything that one run works with, created once by a verb.

`fit` opens a training context, trains, measures and closes the run; `evaluate` opens an evaluation context, measures
and closes the run; `ablate` and `bench` open the same contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.tasks import Prompt
from eagle3_lab.decode.methods import Head
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.find_head import NotTrained, own_head, run_folder
from eagle3_lab.pipeline.head_module import build_module
from eagle3_lab.pipeline.head_references import HeadPlace
from eagle3_lab.pipeline.run_folder import RunFolder
from eagle3_lab.pipeline.trained_heads import Heads, load_heads
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import provenance
from eagle3_lab.tracking.run import Run, open_run
from eagle3_lab.training.module import DraftModule


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Everything that one run works with.

    Args:
        experiment: every choice of the run.
        target: the loaded target model.
        data: the experiment's conversations, built for the target; None for an experiment without data.
        module: the experiment's head with its loss; None for an experiment without a model.
        head_place: where the head's trained weights are, or will be; None without a model, or for an untrained head.
        heads: the heads that the evaluation's methods propose with; see `with_heads`.
        tracker: the MLflow run; None before `tracked`, and in all processes but the first.
    """

    experiment: Experiment
    target: HFTarget
    data: ConversationData | None = None
    module: DraftModule | None = None
    head_place: HeadPlace | None = None
    heads: Heads = field(default_factory=Heads)
    tracker: Run | None = None

    @property
    def run(self) -> Run:
        """Return the MLflow run, within `tracked`."""
        assert self.tracker is not None
        return self.tracker

    @property
    def held_out(self) -> list[Prompt] | None:
        """Return the data's held-out prompts; None without data."""
        return None if self.data is None else self.data.prompts()


@dataclass(frozen=True, kw_only=True)
class TrainingContext(RunContext):
    """The run context of an experiment that trains a head. ``folder``: of its checkpoints."""

    data: ConversationData = field()  # pyright: ignore[reportGeneralTypeIssues]  no longer optional
    module: DraftModule = field()  # pyright: ignore[reportGeneralTypeIssues]
    folder: RunFolder


AnyContext = TypeVar("AnyContext", bound=RunContext)


def open_training(experiment: Experiment, verb: str, *, answer: bool = True) -> TrainingContext:
    """Load the target, build the data and a new head, and find the training's folder.

    Args:
        experiment: that trains a head.
        verb: named in errors.
        answer: let the target answer prompts whose responses are missing; False: leave them out.

    Raises:
        UserError: a mistake in the experiment, its data, its target, or the head that it starts from.
    """
    experiment.require_training(verb)
    target = inputs.load_target(experiment)
    data = inputs.build_data(experiment, target, answer=answer)
    module = build_module(experiment, target, data)
    folder = run_folder(experiment, target, data)
    place = HeadPlace(str(folder.draft), ours=True)
    return TrainingContext(
        experiment=experiment, target=target, data=data, module=module, head_place=place, folder=folder
    )


def open_evaluation(
    experiment: Experiment, checkpoint_path: Path | None, *, answer: bool = True, untrained: bool = False
) -> RunContext:
    """Load the target, build the data if the experiment has any, and load its trained head if it has a model.

    Args:
        experiment: that is measured.
        checkpoint_path: of the head; None: see `own_head`.
        answer: as in `open_training`; without a model, nothing is answered.
        untrained: use a head with its first weights where there is no trained one.

    Raises:
        UserError: a mistake in the experiment, its data or its target, a head that does not fit, or no trained head.
    """
    target = inputs.load_target(experiment)
    if experiment.data is None:
        return RunContext(experiment=experiment, target=target)
    data = inputs.build_data(experiment, target, answer=answer and experiment.model is not None)
    if experiment.model is None:
        return RunContext(experiment=experiment, target=target, data=data)
    try:
        place = own_head(experiment, target, data, checkpoint_path)
    except NotTrained:
        if not untrained:
            raise
        place = None
    module = build_module(experiment, target, data)
    if place is not None:
        size = experiment.model.vocabulary_size(target.spec)
        place.load(target, module.source, module.draft, draft_vocab=size)
    module = module.to(target.device).eval()
    return RunContext(experiment=experiment, target=target, data=data, module=module, head_place=place)


def with_heads(context: AnyContext) -> AnyContext:
    """Return the context with the heads of its evaluation's methods. Raises UserError as `load_heads`."""
    experiment, module, target = context.experiment, context.module, context.target
    own = None if module is None else Head(module.source, module.draft, target.record)
    methods = {} if experiment.evaluate is None else experiment.evaluate.methods
    return replace(context, heads=load_heads(own, methods, experiment, target))


@contextmanager
def tracked(
    context: AnyContext, run_id: str | None, state: Path | None, tags: Mapping[str, str]
) -> Iterator[AnyContext]:
    """Open the context's MLflow run, which ends with the ``with`` statement, and yield the context with it.

    Args:
        context: of this process.
        run_id: of an earlier process's run, which is continued; None: a new one.
        state: the file that names that run.
        tags: set beside those of `provenance`.

    Raises:
        UserError: the store cannot be written, or has no such run any more.
    """
    data_hash = "none" if context.data is None else context.data.hash
    tags = provenance(context.experiment.seed, data_hash) | dict(tags)
    try:
        run = open_run(context.experiment.named_tracking(), run_id, tags)
    except UserError as error:
        if run_id is None:
            raise
        raise UserError(f"{error}; restore it, or remove {state} for a new run") from None
    with run:
        yield replace(context, tracker=run)
