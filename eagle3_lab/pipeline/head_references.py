"""Heads as users name them. A file's or a folder's content decides which kind it is.

    mlflow:RUN_ID            the checkpoint that a run of this store logged
    work/x/draft.ckpt        a checkpoint of eagle3_lab, or the folder of the training that wrote it
    heads/mine               a folder in any format of `formats`
    org/name                 the same on the hub

The name of an experiment means the head that it trained: see `pipeline.find_head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3_lab.config import build as build_config
from eagle3_lab.config import load
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.formats import loading
from eagle3_lab.formats.files import CONFIG, PICKLED
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.pipeline.named_experiments import ENDING
from eagle3_lab.system.files import is_file, is_folder, local_path
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.run import run_files
from eagle3_lab.training import checkpoint

RUN = "mlflow:"
DRAFT = "draft.ckpt"
LOGGED, LOGGED_CONFIG = Path("checkpoint") / DRAFT, "config.yaml"


@dataclass(frozen=True)
class HeadPlace:
    """A trained head's place.

    ``place``: a checkpoint's path, or a folder or hub id. ``ours``: whether it is a checkpoint of eagle3_lab.
    ``experiment``: that trained the head, if it is known; its parts are not built yet.
    """

    place: str
    ours: bool
    experiment: Experiment | None = None

    @property
    def path(self) -> Path:
        """Return the place as a path; of a hub id, its text."""
        return Path(self.place)

    def content_hash(self) -> str:
        """Return the hash of the head's files. Raises UserError where they are missing."""
        return checkpoint.content_hash(self.path) if self.ours else loading.content_hash(self.place)

    def load(
        self, target: HFTarget, source: FeatureSource, draft: DraftModel, *, draft_vocab: int | None = None
    ) -> None:
        """Build ``source`` and ``draft`` for ``target`` and load the head's weights into them. ``draft_vocab``: size of
        the draft vocabulary that a checkpoint must have; None: any. Raises UserError where they do not fit."""
        if self.ours:
            checkpoint.restore(self.path, target, source, draft, draft_vocab=draft_vocab)
        else:
            loading.load(loading.read(self.place), target, source, draft)

    def load_parts(self, target: HFTarget, experiment: Experiment) -> tuple[FeatureSource, DraftModel]:
        """Return the head in new parts: those of the experiment that trained it, those that its files describe, or,
        where neither is known, those of ``experiment``.

        Raises:
            UserError: parts that do not fit, or none.
        """
        if not self.ours:
            head = loading.read(self.place)
            source, draft = loading.parts_for(head, target)
            loading.load(head, target, source, draft)
            return source, draft
        trained = self.experiment
        if trained is None and experiment.model is not None and experiment.config is not None:
            trained = build_config(experiment.config)  # a new experiment, whose parts are not built
        if trained is None or trained.model is None:
            raise UserError(f"{self.place}: does not say which experiment trained it; name that experiment instead")
        source, draft = trained.model.features, trained.model.draft
        self.load(target, source, draft, draft_vocab=trained.model.vocabulary_size(target.spec))
        return source, draft


def find_place(reference: str, store: Path) -> HeadPlace | None:
    """Return the head that a reference names; None where it is neither a run nor a file or folder of this machine.

    Raises:
        UserError: a run without a head, or a file or folder that is none.
    """
    if reference.startswith(RUN):
        return _logged_by(reference.removeprefix(RUN), store)
    try:
        path = local_path(reference)
    except UserError:  # cannot be a path, so it can only be a name
        return None
    if is_file(path) and path.suffix != ENDING:
        if path.suffix == ".safetensors" or (path.suffix in PICKLED and is_file(path.with_name(CONFIG))):
            return HeadPlace(reference, ours=False)
        return HeadPlace(str(path), ours=True)
    if is_folder(path):
        if is_file(path / CONFIG):
            return HeadPlace(reference, ours=False)
        if is_file(path / DRAFT):
            return HeadPlace(str(path / DRAFT), ours=True)
    return None


def _logged_by(run_id: str, store: Path) -> HeadPlace:
    files = run_files(store, run_id)
    if not (files / LOGGED).is_file():
        raise UserError(f"{RUN}{run_id}: logged no head ({LOGGED}); name a run in which `fit` trained a head")
    if not (files / LOGGED_CONFIG).is_file():
        return HeadPlace(str(files / LOGGED), ours=True)
    return HeadPlace(str(files / LOGGED), True, load(files / LOGGED_CONFIG, into=Experiment))
