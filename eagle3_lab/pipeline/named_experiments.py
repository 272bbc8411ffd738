"""Experiments that another one names, for the head that they trained: `head:` of a method, `model.start`."""

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
    """The file it was read from; None for one that was built otherwise."""
    return None if experiment.config is None else experiment.config.composed.path


def at(experiment: Experiment, key: str) -> str:
    """ "file:line: key", as far as it is known."""
    where = {} if experiment.config is None else experiment.config.composed.where
    return f"{locate(where, key)}{key}"


def read_named(name: str, asker: Experiment, chain: Sequence[Path] = ()) -> tuple[Path, Experiment]:
    """The experiment called ``name`` (with its ending or without) and its file: looked for from the working folder,
    then beside the file of ``asker``, then among those that are shipped. ``chain``: files that led here.

    Raises:
        UserError: no such experiment, one that leads back to itself, or one that trains nothing.
    """
    file = _find(name, file_of(asker))
    if file.resolve() in [one.resolve() for one in chain]:
        told = " -> ".join(label(one) for one in (*chain, file))
        raise UserError(f"{told}: leads back to itself; name another experiment, or a draft.ckpt")
    experiment = load(file, into=Experiment)
    experiment.require_training(label(file))
    return file, experiment


def names_experiment(name: str, asker: Experiment) -> bool:
    """Return whether an experiment of this name is found, as `read_named` looks for it."""
    try:
        _find(name, file_of(asker))
    except UserError:
        return False
    return True


def in_store(experiment: Experiment, folder: Path) -> Experiment:
    """The same experiment with its runs in ``folder``."""
    found = replace(experiment)
    found.tracking = replace(experiment.tracking, folder=folder)
    return found


def _find(name: str, asker: Path | None) -> Path:
    if not name.strip() or name.strip("./") == "":
        raise UserError(f"{name!r} names no experiment; such as experiments/eagle{ENDING}")
    path = Path(name.removesuffix(ENDING) + ENDING)
    places = [path] if asker is None else [path, asker.parent / path]
    for place in places:
        if is_file(place):
            return place
    try:
        return find_experiment(path)
    except UserError:
        names = {f"experiments/{shipped}" for shipped in shipped_experiments()}
        folder = "; it is a folder" if is_folder(Path(name)) else ""
        raise UserError(f"no experiment {name!r}{folder}{near(str(path), names, otherwise='there are')}") from None
