"""Which trained head a name or an experiment means, and where it is.

An experiment trains in a folder whose name depends on the head that it starts from, and that head may be one that
another experiment trained: so `run_folder` and `find_head` call each other.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from eagle3_lab.config.reading import label
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.formats.files import find_files
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.head_references import HeadPlace, find_place
from eagle3_lab.pipeline.named_experiments import at, file_of, in_store, names_experiment, read_named
from eagle3_lab.pipeline.run_folder import CONTENTS, DRAFT, RunFolder
from eagle3_lab.system.files import is_file, is_folder, local_path
from eagle3_lab.target_model.hf_target import HFTarget

CHECKPOINT = ".ckpt"
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(/[\w.-]+\.(bin|pt|safetensors))?$")


class NotTrained(UserError):
    """An experiment has no trained head for this target yet. ``file``: of the experiment, if it has one."""

    def __init__(self, text: str, file: Path | None = None) -> None:
        super().__init__(text)
        self.file = file


def target_identity(target: HFTarget) -> dict[str, object]:
    """Return what a target's results depend on, by name: hashes of its files' contents, wherever they lie."""
    spec = target.spec
    return {
        "weights": spec.weights_hash,
        "settings": spec.settings_hash,
        "tokenizer": spec.tokenizer_hash,
        "chat template": spec.template_hash,
        "end tokens": list(spec.end_tokens),
    }


def run_folder(
    experiment: Experiment, target: HFTarget, data: ConversationData, chain: Sequence[Path] = ()
) -> RunFolder:
    """Return the folder of an experiment's training. ``chain``: files of the experiments that named this one. Raises
    UserError as `start_head`."""
    assert experiment.model is not None
    start = start_head(experiment, target, chain)
    contents = {f"target's {name}": str(value) for name, value in target_identity(target).items()}
    contents["data's conversations"] = f"{data.hash}, {len(data.train)} documents to train on"
    head, is_public = "none" if start is None else start.content_hash(), experiment.model.public is not None
    contents["model.start's head"] = "none" if is_public else head
    contents["model.public's head"] = head if is_public else "none"
    key = experiment.training_key(contents)
    folder = experiment.tracking.folder / "work" / f"{experiment.name}-{key}"
    return RunFolder(folder, key, {**experiment.training_options(), CONTENTS: contents})


def start_head(experiment: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> HeadPlace | None:
    """Return the head whose weights a training starts from, which ``model.start`` or ``model.public`` names; None for
    random weights. ``chain``: files of the experiments that named this one. Raises UserError where it is missing."""
    assert experiment.model is not None
    start, public = experiment.model.start, experiment.model.public
    key, reference = ("model.public", public) if start is None else ("model.start", str(start))
    if reference is None:
        return None
    file = file_of(experiment)
    try:
        return find_head(reference, experiment, target, (*chain, *([] if file is None else [file])))
    except UserError as error:
        raise UserError(f"{at(experiment, key)}: {error}") from None


def own_head(
    experiment: Experiment, target: HFTarget, data: ConversationData, checkpoint_path: Path | None = None
) -> HeadPlace:
    """Return the head at ``checkpoint_path``; without it the head that `fit` trained of this experiment, or before that
    its public head as it is.

    Raises:
        NotTrained: there is neither.
        UserError: as `find_head`.
    """
    assert experiment.model is not None
    if checkpoint_path is not None:
        return find_head(str(checkpoint_path), experiment, target)
    draft = run_folder(experiment, target, data).draft
    if draft.is_file():
        return HeadPlace(str(draft), ours=True)
    public = None if experiment.model.public is None else start_head(experiment, target)
    if public is None:
        raise _not_trained(draft)
    return public


def check_model(experiment: Experiment, checkpoint_path: Path | None) -> None:
    """Check that an experiment with a ``checkpoint_path`` has a model to load it into. Raises UserError."""
    if checkpoint_path is not None and experiment.model is None:
        raise UserError(
            f"--checkpoint-path: {checkpoint_path} holds a head, and the experiment has no model to load it into"
        )


def check_any_head(experiment: Experiment) -> None:
    """Check, before a target is loaded, that the experiment has a public head, or that some training of its name ended.
    Raises NotTrained."""
    folder = experiment.tracking.folder / "work"
    public = experiment.model is not None and experiment.model.public is not None
    if not public and not any(folder.glob(f"{glob.escape(experiment.name)}-*/{DRAFT}")):
        raise _not_trained(folder)


def _not_trained(path: Path) -> NotTrained:
    return NotTrained(f"{path}: this experiment has no trained head yet; run `fit`, or give --checkpoint-path")


def find_head(reference: str, experiment: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> HeadPlace:
    """Return the head that ``reference`` names: a run's, a checkpoint, a folder or hub id in any format, or the head
    that the experiment of that name trained.

    Args:
        reference: as `experiment` writes it.
        experiment: its store and its file's folder are searched.
        target: that the head is for.
        chain: files of the experiments that named this one.

    Raises:
        UserError: as `find_place` and `trained_by`, or a reference that is none of these.
    """
    if reference.endswith(CHECKPOINT) and not is_file(local_path(reference)):
        raise UserError(f"checkpoint: no file {local_path(reference)}; train one with `fit`")
    place, is_name = find_place(reference, experiment.tracking.folder), names_experiment(reference, experiment)
    if place is not None:
        if is_name and is_folder(local_path(reference)):
            raise UserError(f"{reference}: is a head's folder and an experiment's name; write one of them in full")
        return place
    if not is_name and reference.startswith(("/", ".", "~")):
        raise UserError(f"no file or folder {reference}; name a run, a checkpoint, a folder, an experiment or a hub id")
    if is_name or not HUB_ID.match(reference):
        return trained_by(reference, experiment, target, chain)
    try:
        find_files(reference)
    except UserError:
        try:
            return trained_by(reference, experiment, target, chain)
        except UserError as error:
            raise UserError(f"{error}; nor is a head's folder or a repository of the hub called so") from None
    return HeadPlace(reference, ours=False)


def trained_by(name: str, experiment: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> HeadPlace:
    """Return the head that `fit` trained of the experiment called ``name``, from the store of ``experiment`` or else
    from the store of the named one. ``chain``: files of the experiments that led to this name.

    Raises:
        NotTrained: no such head.
        UserError: as `read_named`, or an experiment for another target.
    """
    file, trained = read_named(name, experiment, chain)
    folder = experiment.tracking.folder
    if trained.target.model != experiment.target.model:
        raise UserError(
            f"{label(file)}: trains for target {trained.target.model!r}, this is {experiment.target.model!r}; name an "
            "experiment of the same target"
        )
    try:
        data = inputs.build_data(trained, target, answer=False)
        for store in dict.fromkeys((folder, trained.tracking.folder)):
            path = run_folder(in_store(trained, store), target, data, chain).draft
            if path.is_file():
                return HeadPlace(str(path), ours=True, experiment=trained)
    except UserError as error:
        raise UserError(f"{label(file)}: {error}") from None
    raise NotTrained(
        f"{label(file)}: no head of it, as it is written, is in {folder} yet; run `python -m eagle3_lab fit "
        f"{label(file)}` first",
        file,
    )
