"""The folder of one training: its checkpoints, and the id of the MLflow run that shows it."""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from eagle3_lab.config.keys import digest
from eagle3_lab.config.reading import brief
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import BY_CONTENT, BY_VALUE
from eagle3_lab.system import distributed
from eagle3_lab.system.files import bytes_text, file_lock, read_object, remove_leftovers, write_text

LAST, DRAFT, STATE, PRODUCTS, LOCK = "last.ckpt", "draft.ckpt", "state.json", "products.json", "lock"
DECIDES = "decides.json"
CONTENTS = "contents"

WITH_ADAMW = 12  # bytes of a float32 parameter with its two moments, in a checkpoint that training continues from
WEIGHT = 4  # bytes of a float32 parameter


@dataclass(frozen=True)
class RunFolder:
    """The folder of one training. Its name ends with a key of what decides the weights, so an unchanged experiment
    finds it again.

    ``key`` also covers the evaluation: the same training with another evaluation belongs to another run. ``decides``
    lists what decides the weights: options "by value" and "by content", and "contents"; see `find_head.run_folder`.
    """

    folder: Path
    key: str
    decides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def with_evaluation(self, evaluation_key: str) -> RunFolder:
        """Return the same folder for a training whose evaluation has this key."""
        return replace(self, key=digest(self.folder.name, evaluation_key))

    @property
    def draft(self) -> Path:
        """The checkpoint of the trained head."""
        return self.folder / DRAFT

    @property
    def last(self) -> Path:
        """The checkpoint that an interrupted training continues from."""
        return self.folder / LAST

    @property
    def state(self) -> Path:
        """The file that names the run."""
        return self.folder / STATE

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder: no other process trains in it or measures its head until the ``with`` statement ends. Where
        several processes train together, the first one locks it. Temporary files of killed processes are removed.

        Raises:
            UserError: another process has locked it, or it cannot be written.
        """
        busy = f"{self.folder}: is being trained by another process; wait for its end, or end it and run this again"
        try:
            lock = file_lock(self.folder / LOCK, busy)
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be written ({error.strerror}); set tracking.folder to a folder that can be "
                "written"
            ) from None
        with lock:
            remove_leftovers(self.folder)
            yield

    def products(self, choose: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        """Return the number format of this training's matrix products, and the reason. The first process calls
        ``choose`` when the training begins; all processes use its result, also when the training is continued."""
        file = self.folder / PRODUCTS
        if distributed.is_first() and not read_object(file):
            write_text(file, json.dumps(dict(zip(("precision", "why"), choose(), strict=True))))
        distributed.wait_for(lambda: bool(read_object(file)))
        choice = read_object(file)
        return choice["precision"], choice["why"]

    def run_id(self) -> str | None:
        """Return the id of this experiment's run; None before its first run."""
        state = self._state()
        return state["run_id"] if state.get("key") == self.key else None

    def origin(self) -> dict[str, str]:
        """Return a tag that names the run in which this training began, if it is another one."""
        state = self._state()
        return {} if state.get("key", self.key) == self.key else {"continues": state["run_id"]}

    def remember(self, run_id: str) -> None:
        """Write the run's id into the folder, before the first step. Raises UserError where that cannot be written."""
        write_text(self.folder / DECIDES, json.dumps(self.decides, indent=1) + "\n")
        write_text(self.state, json.dumps({"run_id": run_id, "key": self.key}))

    def difference(self) -> str:
        """Return a line that says why this training begins anew although others have its name: what differs from the
        most similar one. "" if this training exists or there is no other."""
        name = self.folder.name.rpartition("-")[0]
        files = self.folder.parent.glob(f"{glob.escape(name)}-*/{DECIDES}")
        others = {file.parent: read_object(file) for file in files if file.parent.name.rpartition("-")[0] == name}
        differences = {folder: _differences(self.decides, other) for folder, other in others.items()}
        differences = {folder: options for folder, options in differences.items() if options}
        if self._state() or not differences:
            return ""
        nearest = min(differences, key=lambda folder: (len(differences[folder]), folder.name))
        (first, (value, other_value)), *rest = differences[nearest].items()
        more = f" (and {len(rest)} more: {brief(', '.join(option for option, _ in rest))})" if rest else ""
        return f"training: begins anew: {first} is {brief(value)}, in {nearest.name} {brief(other_value)}{more}"

    def _state(self) -> dict[str, str]:
        state = read_object(self.state)
        return state if isinstance(state.get("run_id"), str) else {}


def _differences(mine: Mapping[str, Mapping[str, str]], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the values that differ, by name: this training's and the other's. An option that counts by content is
    listed only where a content of its section differs."""
    groups = {name: (mine.get(name, {}), other.get(name, {})) for name in (BY_VALUE, BY_CONTENT, CONTENTS)}
    contents, other_contents = groups[CONTENTS]
    sections = [name.partition("'")[0] for name, value in contents.items() if other_contents.get(name) != value]
    differences: dict[str, tuple[str, str]] = {}
    for group, (values, other_values) in groups.items():
        for name in dict.fromkeys([*values, *other_values]):
            listed = group != BY_CONTENT or any(f"{name}.".startswith(f"{section}.") for section in sections)
            if values.get(name) != other_values.get(name) and listed:
                differences[name] = values.get(name, "not there"), other_values.get(name, "not there")
    return differences


def require_writable(folder: Path) -> None:
    """Check that runs can be written into ``folder``, before a long job. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"tracking.folder: {folder} cannot be written ({error.strerror}); name a folder that can be written"
        ) from None


def require_room(folder: Path, module: nn.Module) -> None:
    """Check that a training's checkpoints fit on the disk of ``folder``. Raises UserError."""
    free, needed = shutil.disk_usage(folder).free, disk_bytes(module)
    if free < needed:
        raise UserError(
            f"{folder}: {bytes_text(free)} free, {bytes_text(needed)} needed for checkpoints; free some, or set "
            "tracking.folder to another disk"
        )


def disk_bytes(module: nn.Module) -> int:
    """Return the largest number of bytes that a training writes: two checkpoints with AdamW's state while one replaces
    the other, the trained head, and the run's copy of it."""
    return sum(p.numel() for p in module.parameters()) * (2 * WITH_ADAMW + 2 * WEIGHT)
