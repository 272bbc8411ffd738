"""Training a head: the target's features on disk, if the experiment keeps them, and the training's steps. What already
exists is used."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException

from eagle3_lab.data.feature_store.features import Making
from eagle3_lab.data.feature_store.rows import FromStore, Reading
from eagle3_lab.data.feature_store.shards import Store
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.pipeline.context import TrainingContext
from eagle3_lab.pipeline.run_folder import require_room
from eagle3_lab.system import distributed
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.embedded import cache_folder
from eagle3_lab.tracking.lightning_logger import RunLogger
from eagle3_lab.training import checkpoint
from eagle3_lab.training.callbacks import Finite, Interrupts, Reporter, Saver, Validations
from eagle3_lab.training.module import DraftModule, Loaders
from eagle3_lab.training.trainer import Training, quiet_lightning

# ------------------------------------------------------------------------------------------------------- features


def store_features(context: TrainingContext) -> Reading | None:
    """Return the store of the target's features, completed if it was not; None without a ``features`` section.

    Raises:
        UserError: as `check_features`, or a disk that is too small or cannot be written.
    """
    features = context.experiment.features
    if features is None:
        return None
    if not distributed.is_first():
        distributed.wait_for(lambda: (making := check_features(context)) is None or making.finished)
    making = check_features(context)
    assert making is not None
    with stage("features", "tokens", making.tokens_left(), context.experiment.budgets.get("features")) as s:
        if making.finished:
            s.reused()
        else:
            making.make(context.target, context.data.row_length, context.data.rows_per_batch, on_tokens=s.advance)
        return Reading(Store(making.folder, making.wanted), context.module.needs, features.threads)


def check_features(context: TrainingContext) -> Making | None:
    """Return what the feature store will contain, and where; None without a ``features`` section.

    Raises:
        UserError: the named folder has a store of another target, text, format or of other layers; a layer that the
            target does not have; or ``edge: counted``, which needs rows that no store contains.
    """
    features, module, data = context.experiment.features, context.module, context.data
    if features is None:
        return None
    if module.loss.edge == "counted":
        raise UserError(
            "features: model.edge 'counted' needs rows past the text, which no store contains; set features: null"
        )
    documents = data.all_documents()
    contents = features.contents(context.target, module.needs, documents, data.kept_hash)
    return Making(features.place(contents, cache_folder() / "features"), contents, documents)


@contextmanager
def reading(module: DraftModule, data: ConversationData, store: Reading | None) -> Iterator[None]:
    """Read the batches' features from ``store`` within a ``with`` statement; None: run the target, as without it."""
    if store is None:
        yield
        return
    data.reading, module.read = store, FromStore(module.target.dtype)
    try:
        yield
    finally:
        data.reading, module.read = None, module.target.features


# ------------------------------------------------------------------------------------------------------- training


def check_training(context: TrainingContext) -> None:
    """Check that the data has a row to train on, that the unroll can serve its rows, and the ``features`` section.
    Raises UserError."""
    module, data = context.module, context.data
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
    check_features(context)


def load_or_train(context: TrainingContext, new_run: bool) -> None:
    """Load the trained weights into the context's module, training them first if the folder has none. ``new_run``: the
    run has no copy of the checkpoint yet.

    Raises:
        UserError: a damaged checkpoint, or as `train_head`.
    """
    draft, module, run = context.folder.draft, context.module, context.run
    if draft.is_file():
        if not checkpoint.usable(draft):
            raise UserError(f"{draft}: is damaged; remove it, and training continues from its last checkpoint")
        if new_run:
            run.log_artifact(draft, "checkpoint")
        with stage("training", "steps", budget_s=context.experiment.budgets.get("training")) as s:
            s.reused()
    else:
        train_head(context)
        run.log_artifact(draft, "checkpoint")
    checkpoint.restore(draft, context.target, module.source, module.draft)
    module.to(context.target.device).eval()


def train_head(context: TrainingContext) -> None:
    """Train, or continue from an interrupted training's last checkpoint, and write ``context.folder.draft``. The first
    process logs and saves; the others have no run.

    Raises:
        UserError: no room on the disk, options that Lightning refuses, more processes than rows, a last checkpoint that
            is damaged, or no step taken.
        NotFinite: a loss, a weight or a moment of the optimizer that is NaN or infinite; ``context.folder.last`` is of
            a step before.
        KeyboardInterrupt: Ctrl-C, or SIGTERM (Terminated); ``context.folder.last`` is then of the last step.
    """
    experiment, module, data, folder, run = (
        context.experiment,
        context.module,
        context.data,
        context.folder,
        context.tracker,
    )
    if distributed.is_first():
        require_room(folder.folder, module)
    store = store_features(context)
    options = experiment.trainer
    assert options is not None
    precision, why = folder.products(lambda: options.precision(next(module.parameters()).device))
    last = folder.last if folder.last.is_file() else None
    if run is not None:
        run.set_tags({"products": precision, "products_why": why, "resumed": json.dumps(last is not None)})
        print(f"training: products in {precision} ({why})", file=sys.stderr)
        if last is not None:
            print(f"training: goes on from {last}, in run {run.id}", file=sys.stderr)
    saver = Saver(
        dirpath=folder.folder,
        filename=folder.last.stem,
        train_time_interval=options.save_interval(),
        save_top_k=1,
        enable_version_counter=False,
        save_on_exception=True,
    )
    interrupts, validations = Interrupts(), Validations()
    with quiet_lightning(), stage("training", "steps", None, experiment.budgets.get("training")) as s:
        callbacks = [saver, Reporter(s), Finite(options.log_every_n_steps), validations, interrupts]
        trainer = options.make(RunLogger(run), callbacks, checkpoint.AtomicCheckpointIO(), precision, folder.folder)
        check_processes(trainer.num_nodes * trainer.num_devices, options, data)
        try:
            with interrupts.caught(), reading(module, data, store):
                loaders = Loaders(data)
                trainer.fit(module, datamodule=loaders, ckpt_path=last, weights_only=True)
                validations.finish(trainer, module, loaders)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {' '.join(str(error).split())}") from None
        if trainer.global_step == 0:
            raise UserError("training: ended before its first step, so there is no head; see trainer.callbacks")
        trainer.save_checkpoint(folder.draft, weights_only=True)
    distributed.leave_group()


def check_processes(processes: int, options: Training, data: ConversationData) -> None:
    """Check that the training's rows suffice for its processes; only the first process does. Raises UserError."""
    loader = data.train_dataloader()
    rows = loader.order.rows
    if distributed.is_first() and processes > rows:
        raise UserError(
            f"trainer.devices: {processes} processes, but the training data fills {rows} rows of {data.row_length} "
            f"tokens; use at most {rows} processes, or a smaller data.row_length"
        )
    options.check(math.ceil(len(loader) / processes))
