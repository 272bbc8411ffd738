"""The stages of a training: what is kept of the target, the head with its first weights, its steps. Each reports
itself, and reuses what is there. (`inputs` comes before them, `closing` behind.)"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from eagle3_lab.backend.compile import require_compiler
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.feature_store.features import Making
from eagle3_lab.data.feature_store.rows import FromStore, Reading
from eagle3_lab.data.feature_store.shards import Store
from eagle3_lab.data.module import ConversationData
from eagle3_lab.draft.vocab import choose
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.named_experiments import at
from eagle3_lab.pipeline.run_folder import Work, beginning, require_room
from eagle3_lab.system import distributed
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.embedded import cache_folder
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.lightning_logger import RunLogger
from eagle3_lab.tracking.run import Run
from eagle3_lab.training import checkpoint
from eagle3_lab.training.callbacks import Finite, Interrupts, Reporter, Saver, Validations
from eagle3_lab.training.module import DraftModule, Loaders
from eagle3_lab.training.trainer import Training, quiet_lightning

# ------------------------------------------------------------------------------------------------------- features


def keep_features(
    experiment: Experiment, target: HFTarget, data: ConversationData, module: DraftModule
) -> Reading | None:
    """The store of the target's features, made or finished where it is not; None where the experiment keeps none.

    Raises:
        UserError: as `check_features`, or a disk that is too small or cannot be written.
    """
    if experiment.features is not None and not distributed.is_first():
        distributed.wait_for(
            lambda: (making := check_features(experiment, target, data, module)) is None or making.finished
        )
    making = check_features(experiment, target, data, module)
    if experiment.features is None or making is None:
        return None
    with stage("features", "tokens", making.tokens_left(), experiment.budgets.get("features")) as s:
        if making.finished:
            s.reused()
        else:
            making.make(target, data.row_length, data.rows_per_batch, on_tokens=s.advance)
        return Reading(Store(making.folder, making.wanted), module.needs, experiment.features.threads)


def check_features(
    experiment: Experiment, target: HFTarget, data: ConversationData, module: DraftModule
) -> Making | None:
    """What is to be kept of the target and where; None where nothing is.

    Raises:
        UserError: a store of another target, text, format or of other layers in the named folder, a layer that the
            target has not, or an edge that is taught by rows of which nothing is kept.
    """
    features = experiment.features
    if features is None:
        return None
    if module.loss.edge == "counted":
        raise UserError("features: model.edge 'counted' is taught by rows past the text, of which no store knows; null")
    found = data.all_documents()
    contents = features.contents(target, module.needs, found, data.kept_hash)
    return Making(features.place(contents, cache_folder() / "features"), contents, found)


# ------------------------------------------------------------------------------------------------------- training


def check_compiler(experiment: Experiment) -> None:
    """Refuse a loss that is to be compiled where nothing compiles, before target and data are there. Raises UserError
    as `require_compiler`."""
    if experiment.model is not None and experiment.model.compile:
        device = experiment.target.device
        require_compiler(torch.cuda.is_available() if device == "auto" else device.startswith("cuda"))


def build_module(experiment: Experiment, target: HFTarget, data: ConversationData) -> DraftModule:
    """A head for this target: its weights drawn from the experiment's seed, or those of ``model.start`` or
    ``model.public``.

    Raises:
        UserError: options that contradict each other or do not fit the target or the data, or a beginning of other
            parts or for another target.
    """
    model = experiment.model
    assert model is not None and experiment.optimizer is not None
    for key, depth in (("model.unroll.depth", model.unroll.depth), ("judged_depth", experiment.judged_depth)):
        if depth >= data.row_length:
            raise UserError(f"{key}: {depth}, but a row has {data.row_length} tokens; fewer steps, or data.row_length")
    torch.manual_seed(experiment.seed)
    try:
        _begin(experiment, target, data)
        module = DraftModule(
            target,
            model.features,
            model.draft,
            model.unroll,
            model.loss(),
            experiment.optimizer,
            noise=model.noise,
            seed=experiment.seed,
            judged_depth=experiment.judged_depth,
            compiled=model.compile,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return module.to(target.device)


def _begin(experiment: Experiment, target: HFTarget, data: ConversationData) -> None:
    """Build the model's parts, with the weights they begin with."""
    model = experiment.model
    assert model is not None
    if (start := beginning(experiment, target)) is not None:
        try:
            start.load(target, model.features, model.draft, draft_vocab=model.vocabulary_size(target.spec))
        except UserError as error:
            key = "model.public" if model.start is None else "model.start"
            raise UserError(f"{at(experiment, key)}: {error}") from None
    else:
        width = model.features.build(target)
        model.draft.build(target, width, draft_vocabulary(experiment, target, data).to(target.device))


def draft_vocabulary(experiment: Experiment, target: HFTarget, data: ConversationData) -> Int[Tensor, " Vd"]:
    """The target ids that the draft will be able to say. Raises ValueError for a size that cannot be."""
    assert experiment.model is not None
    size = experiment.model.vocabulary_size(target.spec)
    always = sorted({*Chat(target.tokenizer).kept_ids, *target.spec.end_tokens})
    return choose(data.token_counts(), size, always, target.spec.real_vocab)


def check_rows(module: DraftModule, data: ConversationData) -> None:
    """Refuse conversations that would train nothing, or lie so in their rows that the unroll cannot serve them. Raises
    UserError."""
    keys = module.unroll.attention()
    for batch in data.train_dataloader():
        keys.check(batch.document)
        if bool(module.loss.weights(batch, 1).any()):
            break
    else:
        raise UserError(
            f"{data.path}: no row can be trained on with mask {module.loss.mask!r} within max_length "
            f"{data.max_length}: every answer ends before its second token; longer answers or a larger max_length are "
            "needed"
        )


def train_head(
    experiment: Experiment, module: DraftModule, data: ConversationData, run: Run | None, work: Work
) -> None:
    """Train, going on from the last checkpoint of an interrupted run; ends with ``work.draft``. What is chosen on the
    way is tagged. ``run`` is None in all processes but the first, which alone logs and saves.

    Raises:
        UserError: no room on the disk, options that Lightning refuses, more processes than rows, a last checkpoint that
            is damaged, or no step taken.
        NotFinite: a loss, a weight or a moment of the optimizer that is NaN or infinite; ``work.last`` is of a step
            before.
        KeyboardInterrupt: Ctrl-C, or SIGTERM (Terminated); ``work.last`` is then the last step's.
    """
    if distributed.is_first():
        require_room(work.folder, module)
    kept = keep_features(experiment, module.target, data, module)
    options = experiment.trainer
    assert options is not None
    precision, why = work.products(lambda: options.precision(next(module.parameters()).device))
    going_on = work.last if work.last.is_file() else None
    if run is not None:
        run.set_tags({"products": precision, "products_why": why, "resumed": str(going_on is not None).lower()})
        print(f"training: products in {precision} ({why})", file=sys.stderr)
        if going_on is not None:
            print(f"training: goes on from {going_on}, in run {run.id}", file=sys.stderr)
    saver = Saver(
        dirpath=work.folder,
        filename=work.last.stem,
        train_time_interval=options.save_interval(),
        save_top_k=1,
        enable_version_counter=False,
        save_on_exception=True,
    )
    interrupts, validations = Interrupts(), Validations()
    with quiet_lightning(), stage("training", "steps", None, experiment.budgets.get("training")) as s:
        callbacks = [saver, Reporter(s), Finite(options.log_every_n_steps), validations, interrupts]
        trainer = options.make(RunLogger(run), callbacks, checkpoint.AtomicCheckpointIO(), precision, work.folder)
        check_processes(trainer.num_nodes * trainer.num_devices, options, data)
        try:
            with interrupts.caught(), reading(module, data, kept):
                loaders = Loaders(data)
                trainer.fit(module, datamodule=loaders, ckpt_path=going_on, weights_only=True)
                validations.finish(trainer, module, loaders)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {' '.join(str(error).split())}") from None
        if trainer.global_step == 0:
            raise UserError("training: ended before its first step, so there is no head; see trainer.callbacks")
        trainer.save_checkpoint(work.draft, weights_only=True)
    distributed.part()


def check_processes(processes: int, options: Training, data: ConversationData) -> None:
    """Refuse, in the first process and so before the others work, what they could not share. Raises UserError."""
    loader = data.train_dataloader()
    if distributed.is_first() and processes > loader.order.rows:
        raise UserError(
            f"trainer.devices: {processes} processes, but the training data fills {loader.order.rows} rows of "
            f"{data.row_length} tokens; at most {loader.order.rows} processes, or a smaller data.row_length"
        )
    options.check(math.ceil(len(loader) / processes))


@contextmanager
def reading(module: DraftModule, data: ConversationData, kept: Reading | None) -> Iterator[None]:
    """Within, batches bring their features from the store and the target is not run; None: it is, as ever."""
    if kept is None:
        yield
        return
    data.reading, module.read = kept, FromStore(module.target.dtype)
    try:
        yield
    finally:
        data.reading, module.read = None, module.target.features
