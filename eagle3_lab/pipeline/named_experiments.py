"""Experiments that another experiment names (`head:` of a method, `model.start`), for the head that they trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3_lab.config import find_experiment, load, shipped_experiments
from eagle3_lab.config.reading import label, locate
from eagle3_lab.errors import UserError, near
from eagle3_lab.experiment import Experiment
from eagle3_lab.system.files import is_file, is_folder

ENDING = ".yaml"


def file_of(experiment: Experiment) -> Path | None:
    """Return the file that an experiment was read from; None for one that was built without a file."""
    return None if experiment.config is None else experiment.config.composed.path


def at(experiment: Experiment, key: str) -> str:
    """Return "file:line: key", for error texts; the key alone where its file is not known."""
    where = {} if experiment.config is None else experiment.config.composed.where
    return f"{locate(where, key)}{key}"


def read_named(name: str, experiment: Experiment, chain: Sequence[Path] = ()) -> tuple[Path, Experiment]:
    """Return the file and the experiment that a name means.

    Args:
        name: with or without ``.yaml``. It is searched from the working folder, then beside the file of ``experiment``,
            then among the shipped experiments.
        experiment: that contains the name.
        chain: files of the experiments that led to this name.

    Raises:
        UserError: no such experiment, one that leads back to itself, or one that trains no head.
    """
    file = _find(name, file_of(experiment))
    if file.resolve() in [link.resolve() for link in chain]:
        names = " -> ".join(label(link) for link in (*chain, file))
        raise UserError(f"{names}: leads back to itself; name another experiment, or a draft.ckpt")
    named = load(file, into=Experiment)
    named.require_training(label(file))
    return file, named


def names_experiment(name: str, experiment: Experiment) -> bool:
    """Return whether `read_named` finds an experiment of this name."""
    try:
        _find(name, file_of(experiment))
    except UserError:
        return False
    return True


def in_store(experiment: Experiment, folder: Path) -> Experiment:
    """Return a copy of the experiment whose runs are in ``folder``."""
    return replace(experiment, tracking=replace(experiment.tracking, folder=folder))


def _find(name: str, file: Path | None) -> Path:
    if not name.strip() or name.strip("./") == "":
        raise UserError(f"{name!r} names no experiment; write a name such as experiments/eagle{ENDING}")
    path = Path(name.removesuffix(ENDING) + ENDING)
    for candidate in [path] if file is None else [path, file.parent / path]:
        if is_file(candidate):
            return candidate
    try:
        return find_experiment(path)
    except UserError:
        names = {f"experiments/{shipped}" for shipped in shipped_experiments()}
        folder = "; it is a folder" if is_folder(Path(name)) else ""
        raise UserError(f"no experiment {name!r}{folder}{near(str(path), names, otherwise='there are')}") from None
