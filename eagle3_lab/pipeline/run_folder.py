"""The folder of one training: its checkpoints, and the run that shows it."""

from __future__ import annotations

import glob
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from eagle3_lab.config.keys import digest
from eagle3_lab.config.reading import brief, label
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import BY_CONTENT, BY_VALUE, Experiment
from eagle3_lab.formats.files import find_files
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.head_references import HeadPlace, find_place
from eagle3_lab.pipeline.named_experiments import at, file_of, in_store, names_experiment, read_named
from eagle3_lab.system import distributed
from eagle3_lab.system.files import (
    bytes_text,
    hold,
    is_file,
    is_folder,
    local_path,
    read_object,
    remove_leftovers,
    write_text,
)
from eagle3_lab.target_model.hf_target import HFTarget

CHECKPOINT = ".ckpt"
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(/[\w.-]+\.(bin|pt|safetensors))?$")
LAST, DRAFT, STATE, PRODUCTS, LOCK = "last.ckpt", "draft.ckpt", "state.json", "products.json", "lock"
DECIDES = "decides.json"
CONTENTS = "contents"

WITH_ADAMW = 12  # bytes of a float32 parameter in a checkpoint that training goes on from: itself and two moments
ALONE = 4


@dataclass(frozen=True)
class Work:
    """The folder of one training, named by content, so that an unchanged experiment finds it again.

    ``key`` is of everything that its run shows: the same training measured otherwise is shown by another run.
    ``decides``: what decides the training, to tell two apart: options "by value" and "by content", and "contents".
    """

    folder: Path
    key: str
    decides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(experiment: Experiment, target: HFTarget, data: ConversationData, chain: Sequence[Path] = ()) -> Work:
        """``chain``: files of experiments that named this one. Raises UserError as `beginning`."""
        assert experiment.model is not None
        start = beginning(experiment, target, chain)
        contents = {f"target's {name}": str(value) for name, value in identity(target).items()}
        contents["data's conversations"] = f"{data.hash}, {len(data.train)} documents to train on"
        begun, public = "none" if start is None else start.content_hash(), experiment.model.public is not None
        contents["model.start's head"] = "none" if public else begun
        contents["model.public's head"] = begun if public else "none"
        key = experiment.training_key(contents)
        folder = experiment.tracking.folder / "work" / f"{experiment.name}-{key}"
        return Work(folder, key, {**experiment.training_options(), CONTENTS: contents})

    def measured(self, evaluation_key: str) -> Work:
        """The same training, measured as that key says."""
        return replace(self, key=digest(self.folder.name, evaluation_key))

    def news(self) -> str:
        """Why this training is not one of those that are there under its name: what differs from the one that is most
        alike; "" where it is there, or no other is."""
        name = self.folder.name.rpartition("-")[0]
        files = self.folder.parent.glob(f"{glob.escape(name)}-*/{DECIDES}")
        others = {file.parent: read_object(file) for file in files if file.parent.name.rpartition("-")[0] == name}
        found = {folder: told for folder, other in others.items() if (told := _differing(self.decides, other))}
        if self._state() or not found:
            return ""
        near = min(found, key=lambda folder: (len(found[folder]), folder.name))
        (first, (here, there)), *more = found[near].items()
        told = f" (and {len(more)} more: {brief(', '.join(name for name, _ in more))})" if more else ""
        return f"training: begins anew: {first} is {brief(here)}, in {near.name} {brief(there)}{told}"

    @property
    def draft(self) -> Path:
        """The trained head."""
        return self.folder / DRAFT

    @property
    def last(self) -> Path:
        """Where an interrupted training goes on from."""
        return self.folder / LAST

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, no other process trains in this folder or measures what was trained there; the system lets go of it
        when this one ends, however it ends. Of several processes that train together the first one holds it. What a
        killed one left half-written is removed.

        Raises:
            UserError: another process holds it, or it cannot be written.
        """
        busy = f"{self.folder}: is being trained by another process; wait for its end, or end it and run this again"
        try:
            held = hold(self.folder / LOCK, busy)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror}); a folder that can") from None
        with held:
            remove_leftovers(self.folder)
            yield

    def products(self, choose: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """The number format of this training's products and why: chosen by its first process when it begins, then the
        same for all its processes and whenever it goes on, however fast the machine is by then."""
        file = self.folder / PRODUCTS
        if distributed.is_first() and not read_object(file):
            write_text(file, json.dumps(dict(zip(("precision", "why"), choose(), strict=True))))
        distributed.wait_for(lambda: bool(read_object(file)))
        said = read_object(file)
        return said["precision"], said["why"]

    def run_id(self) -> str | None:
        """The run that was started for this very experiment; None where there is none yet."""
        said = self._state()
        return said["run_id"] if said.get("key") == self.key else None

    def origin(self) -> dict[str, str]:
        """A tag that names the run of this training's beginning, where that is another one."""
        said = self._state()
        return {} if said.get("key", self.key) == self.key else {"continues": said["run_id"]}

    def remember(self, run_id: str) -> None:
        """Tie this training to a run, before its first step. Raises UserError where that cannot be written."""
        write_text(self.folder / DECIDES, json.dumps(self.decides, indent=1) + "\n")
        write_text(self.folder / STATE, json.dumps({"run_id": run_id, "key": self.key}))

    def _state(self) -> dict[str, str]:
        found = read_object(self.folder / STATE)
        return found if isinstance(found.get("run_id"), str) else {}


def _differing(mine: Mapping[str, Mapping[str, str]], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What differs by name, here and there. An option that counts by content is named where a content below its section
    differs: it may be why."""
    found: dict[str, tuple[str, str]] = {}
    groups = [(mine.get(group, {}), other.get(group, {})) for group in (BY_VALUE, BY_CONTENT, CONTENTS)]
    roots = [name.partition("'")[0] for name, value in groups[-1][0].items() if groups[-1][1].get(name) != value]
    for group, (here, there) in zip((BY_VALUE, BY_CONTENT, CONTENTS), groups, strict=True):
        for name in dict.fromkeys([*here, *there]):
            explains = group != BY_CONTENT or any(f"{name}.".startswith(f"{root}.") for root in roots)
            if here.get(name) != there.get(name) and explains:
                found[name] = here.get(name, "not there"), there.get(name, "not there")
    return found


def identity(target: HFTarget) -> dict[str, object]:
    """What a target's results depend on, by name: its files' content, not their place."""
    spec = target.spec
    return {
        "weights": spec.weights_hash,
        "settings": spec.settings_hash,
        "tokenizer": spec.tokenizer_hash,
        "chat template": spec.template_hash,
        "end tokens": list(spec.end_tokens),
    }


def beginning(experiment: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> HeadPlace | None:
    """The head that a training goes on from, as ``model.start`` or ``model.public`` names it. ``chain``: files that led
    here. Raises UserError where there is none."""
    assert experiment.model is not None
    start, public = experiment.model.start, experiment.model.public
    key, reference = ("model.public", public) if start is None else ("model.start", str(start))
    if reference is None:
        return None
    own = file_of(experiment)
    try:
        return find_head(reference, experiment, target, (*chain, *([] if own is None else [own])))
    except UserError as error:
        raise UserError(f"{at(experiment, key)}: {error}") from None


def find_head(reference: str, asker: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> HeadPlace:
    """The head that ``reference`` names: a run's, a checkpoint, a folder or hub id in any format, or what the
    experiment of that name trained. ``chain``: files of experiments that led here.

    Raises:
        UserError: what `find_place` and `trained_by` refuse, or a name that is none of these.
    """
    if reference.endswith(CHECKPOINT) and not is_file(local_path(reference)):
        raise UserError(f"checkpoint: no file {local_path(reference)}; train one with `fit`")
    place = find_place(reference, asker.tracking.folder)
    if place is not None and not (is_folder(local_path(reference)) and names_experiment(reference, asker)):
        return place
    if place is not None:
        raise UserError(f"{reference}: is a head's folder and an experiment's name; write one of them in full")
    named = names_experiment(reference, asker)
    if not named and reference.startswith(("/", ".", "~")):
        raise UserError(f"no file or folder {reference}; name a run, a checkpoint, a folder, an experiment or a hub id")
    if named or not HUB_ID.match(reference):
        path, trained = trained_by(reference, asker, target, chain)
        return HeadPlace(str(path), True, trained)
    try:
        find_files(reference)
    except UserError:
        try:
            trained_by(reference, asker, target, chain)
        except UserError as error:
            raise UserError(f"{error}; nor is a head's folder or a repository of the hub called so") from None
    return HeadPlace(reference, ours=False)


class NotTrained(UserError):
    """An experiment that trained no head for the target at hand. ``file``: its own."""

    def __init__(self, file: Path, text: str) -> None:
        super().__init__(text)
        self.file = file


def trained_by(name: str, asker: Experiment, target: HFTarget, chain: Sequence[Path] = ()) -> tuple[Path, Experiment]:
    """Where the head lies that `fit` made of the experiment called ``name``, in ``asker``'s store or else in its own,
    and that experiment, its parts not yet built. ``chain``: files that led here.

    Raises:
        UserError: what `read_named` refuses, an experiment for another target, or one that was not trained.
    """
    file, experiment = read_named(name, asker, chain)
    folder = asker.tracking.folder
    if experiment.target.model != asker.target.model:
        raise UserError(
            f"{label(file)}: trains for target {experiment.target.model!r}, this is {asker.target.model!r}; name an "
            "experiment of the same target"
        )
    try:
        data = inputs.build_data(experiment, target, answer=False)
        for store in dict.fromkeys((folder, experiment.tracking.folder)):
            path = Work.of(in_store(experiment, store), target, data, chain).draft
            if path.is_file():
                return path, experiment
    except UserError as error:
        raise UserError(f"{label(file)}: {error}") from None
    raise NotTrained(
        file,
        f"{label(file)}: no head of it, as it is written, is in {folder} yet; run `python -m eagle3_lab fit "
        f"{label(file)}` first",
    )


def require_writable(folder: Path) -> None:
    """Tell now, not after minutes of work, that runs cannot be kept. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"tracking.folder: {folder} cannot be written ({error.strerror}); name a folder that can"
        ) from None


def require_room(folder: Path, module: nn.Module) -> None:
    """Tell before training that its checkpoints will not fit. Raises UserError."""
    free, needed = shutil.disk_usage(folder).free, disk_bytes(module)
    if free < needed:
        raise UserError(
            f"{folder}: {bytes_text(free)} free, {bytes_text(needed)} needed for checkpoints; free some, or set "
            "tracking.folder to another disk"
        )


def disk_bytes(module: nn.Module) -> int:
    """What a training writes at most: two checkpoints with AdamW's state while one replaces the other, the head, and
    its copy in the run."""
    return sum(p.numel() for p in module.parameters()) * (2 * WITH_ADAMW + 2 * ALONE)
