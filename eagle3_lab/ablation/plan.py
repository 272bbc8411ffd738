"""From ``ablation.yaml`` to cells: each is a complete, checked experiment with an identity of its own.

A cell begins from ``base``, or from the whole ``experiment`` that it names; ``shared`` is laid over either, then the
cell's own lines, then its data scale and its seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eagle3_lab.ablation.figure_names import FIGURES
from eagle3_lab.ablation.identity import cell_key, cell_options
from eagle3_lab.config import Composed, Config, ConfigError, Document, build, check, compose_document, overlay, read
from eagle3_lab.config.reading import label, locate, show
from eagle3_lab.errors import UserError, near
from eagle3_lab.experiment import SHOWN, Experiment
from eagle3_lab.tracking.params import flatten
from eagle3_lab.tracking.run import Tracking

FILE = "ablation.yaml"
PARTS = ("base", "shared", "cells", "decode")
"""Keys that hold experiments or parts of them, beside those of `Question`."""

OWN = ("experiment", "scales", "seeds", "steps")
"""Keys of a cell that are no experiment's."""

NAME = re.compile(r"(?=.*[^\W\d])\w+")


@dataclass(frozen=True)
class Question:
    """What an ablation asks, and how its cells are multiplied and compared.

    Args:
        question: in words.
        seeds: each cell is trained with each of them, which draws weights and the order of the data.
        scales: amounts of data, as multiples of the smallest: of 1, 2 and 4 the first two are trained on a quarter
            and on half of the conversations that the last one has, each within the next.
        steps: ``scaled``: every scale has as many passes over its data; ``same``: as many steps.
        against: the cell that the others are compared with; null: the first one.
        figures: what is drawn, by name.

    Raises:
        ValueError: no seed, no scale, one that is there twice, or an unknown figure.
    """

    question: str
    seeds: list[int] = field(default_factory=lambda: [0])
    scales: list[int] = field(default_factory=lambda: [1])
    steps: Literal["scaled", "same"] = "scaled"
    against: str | None = None
    figures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key, values in (("seeds", self.seeds), ("scales", self.scales)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{key} must be at least one number, none of them twice, got {values}")
        if min(self.seeds) < 0 or min(self.scales) < 1:
            raise ValueError(f"seeds must be >= 0 and scales >= 1, got {self.seeds} and {self.scales}")
        for name in self.figures:
            if name not in FIGURES:
                raise ValueError(f"figures: {name!r} is no figure{near(name, FIGURES)}")


@dataclass(frozen=True)
class Cell:
    """One training. ``name`` is its line in the file; ``label`` also tells the scale, where the ablation has several;
    ``settings`` has the keys that vary within the ablation, as the command line calls them."""

    name: str
    label: str
    scale: int
    seed: int
    config: Config[Experiment]
    key: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name among all cells, and that of its files."""
        return f"{self.label}-{self.seed}"


@dataclass(frozen=True)
class Ablation:
    """A question with all its cells, in the order of the file. ``decode``: what is measured by decoding once all cells
    are there, an experiment's ``evaluate`` section in which a method's ``head`` names a cell. ``overrides``: keys and
    texts that the command line laid over every cell."""

    folder: Path
    question: Question
    cells: tuple[Cell, ...]
    decode: Document | None = None
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name

    @property
    def tracking(self) -> Tracking:
        """Where the runs are kept, the same place for all cells."""
        given = self.cells[0].config.plain["tracking"]
        return Tracking(Path(given.get("init_args", given)["folder"]), self.name)

    @property
    def against(self) -> str:
        """The name of the cell that the others are compared with."""
        return self.question.against or self.cells[0].name

    def chosen(self, name: str) -> list[Cell]:
        """Return the cells of a name (``eagle``), of a label (``eagle-x2``), of a title (``eagle-x2-0``), or with a
        number in the list, from 1. Raises UserError where there is none."""
        if name.isdecimal():
            if not 1 <= int(name) <= len(self.cells):
                raise UserError(f"--cell: {name}, but {self.name} has cells 1 .. {len(self.cells)}; see --list")
            return [self.cells[int(name) - 1]]
        found = [cell for cell in self.cells if name in (cell.name, cell.label, cell.title)]
        if not found:
            names = [name for cell in self.cells for name in (cell.name, cell.label, cell.title)]
            raise UserError(f"--cell: {self.name} has no cell {name!r}{near(name, names, otherwise='there are')}")
        return found


def read_ablation(folder: Path, overrides: Sequence[tuple[str, str]] = ()) -> Ablation:
    """Read an ablation's folder. ``overrides``: dotted keys of an experiment and YAML texts, for every cell.

    Raises:
        UserError: no such folder, a file with an unknown key, a cell that is no experiment, two cells of one
            configuration, or a figure that needs what no cell gives.
    """
    path = folder if folder.name == FILE else folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: no ablation ({label(path)} is not there); name a folder that has one")
    document = read(path)
    _require_names(document, path)
    question = _question(document, path)
    made = [cell for name in document.tree["cells"] for cell in _cells(document, name, question, path, overrides)]
    _refuse_equals(made, document)
    if (against := question.against) is not None and against not in document.tree["cells"]:
        known = near(against, document.tree["cells"], otherwise="there are")
        raise ConfigError(f"{locate(document.where, 'against')}against: no cell {against!r}{known}")
    decode = None if document.tree.get("decode") is None else document.at("decode")
    _check_figures(question, made, decode, document)
    return Ablation(path.parent, question, tuple(_with_settings(made)), decode, tuple(overrides))


def _require_names(document: Document, path: Path) -> None:
    """Raises ConfigError without cells, or for names that can be no file's."""
    cells, base = document.tree.get("cells"), document.tree.get("base")
    if not isinstance(cells, dict) or not cells:
        raise ConfigError(f"{label(path)}: cells: expected a mapping of names to what is laid over base")
    for name, given in cells.items():
        place = locate(document.where, f"cells.{name}", otherwise=label(path))
        if not NAME.fullmatch(name):
            raise ConfigError(f"{place}cells.{name}: a name is letters, digits and '_', not digits alone")
        if base is None and not (isinstance(given, dict) and "experiment" in given):
            raise ConfigError(f"{place}cells.{name}: there is no base; write one, or the cell's experiment")


def _question(document: Document, path: Path) -> Question:
    """The ablation's own keys, checked."""
    tree = {key: value for key, value in document.tree.items() if key not in PARTS}
    where = {key: place for key, place in document.where.items() if key.partition(".")[0] not in PARTS}
    composed = Composed(path, tree, where, "", tree)
    return build(check(composed, Question, also=PARTS))


def _cells(
    document: Document, name: str, question: Question, path: Path, overrides: Sequence[tuple[str, str]]
) -> list[Cell]:
    """A cell at all its scales, with all its seeds."""
    own = Document({}) if document.tree["cells"][name] is None else document.at(f"cells.{name}")
    question = _own_question(question, own, path)
    start = own.at("experiment") if "experiment" in own.tree else document.at("base")
    if document.tree.get("shared") is not None:
        start = overlay(start, document.at("shared"))
    lines = {key: value for key, value in own.tree.items() if key not in OWN}
    data = lines.get("data")
    for key, given in (("seed", lines), ("data.seed", data), ("data.share", data)):
        if isinstance(given, dict) and key.rpartition(".")[2] in given:
            place = locate(own.where, key, otherwise=label(path))
            raise ConfigError(f"{place}cells.{name}.{key}: is set from the ablation's seeds and scales; write those")
    start = overlay(start, Document(lines, own.where))
    largest = _largest(document)
    found: list[Cell] = []
    for scale in question.scales:
        for seed in question.seeds:
            config = _config(start, path, overrides, seed, scale / largest, question.steps, name)
            shown = name if largest == 1 else f"{name}-x{scale}"
            found.append(Cell(name, shown, scale, seed, config, cell_key(cell_options(config))))
    return found


def _own_question(question: Question, own: Document, path: Path) -> Question:
    """The question with what a cell says itself of scales, seeds and steps."""
    given = {key: own.tree[key] for key in OWN if key in own.tree and key != "experiment"}
    where = {key: place for key, place in own.where.items() if key in given}
    tree = {"question": question.question, **given}
    said = build(check(Composed(path, tree, where, "", tree), Question))
    return replace(question, **{key: vars(said)[key] for key in given})


def _largest(document: Document) -> int:
    """The largest scale that any cell names: all the data."""
    named = [document.tree.get("scales", [1])]
    named += [cell["scales"] for cell in document.tree["cells"].values() if isinstance(cell, dict) and "scales" in cell]
    numbers = [one for some in named if isinstance(some, list) for one in some if isinstance(one, int)]
    return max([*numbers, 1])


def _config(
    start: Document,
    path: Path,
    overrides: Sequence[tuple[str, str]],
    seed: int,
    share: float,
    steps: Literal["scaled", "same"],
    name: str,
) -> Config[Experiment]:
    """A cell's experiment with its seed, trained on a share of the data."""
    patch: dict[str, Any] = {"seed": seed, "data": {"seed": seed}}
    patch["tracking"] = {"experiment": path.resolve().parent.name, "run_name": name}
    document = overlay(start, Document(patch))
    if share < 1:
        whole = check(compose_document(document, path, overrides), Experiment).plain
        document = overlay(document, Document(_scaled(whole, share, steps, f"{label(path)}: cells.{name}")))
    return check(compose_document(document, path, overrides), Experiment)


def _scaled(whole: Mapping[str, Any], share: float, steps: Literal["scaled", "same"], place: str) -> dict[str, Any]:
    """What a share of the data changes in an experiment on all of it."""
    if whole["trainer"] is None or whole["data"] is None:
        raise ConfigError(f"{place}: has no trainer or no data; add what a head is trained with")
    trainer = whole["trainer"].get("init_args", whole["trainer"])
    most, passes = trainer["max_steps"], trainer["max_epochs"]
    if most != -1 and passes not in (None, -1):
        raise ConfigError(f"{place}: trainer has max_steps and max_epochs, so it is open which one scales; leave one")
    if most == -1 and passes is None:
        raise ConfigError(f"{place}: trainer has no max_steps and no max_epochs; with several scales one is needed")
    changed: dict[str, Any] = {}
    if most != -1 and steps == "scaled":
        changed = {"max_steps": max(1, round(most * share))}
    elif most == -1 and steps == "same":
        changed = {"max_epochs": max(1, round(passes / share))}
    return {"data": {"share": share}, "trainer": changed}


def _refuse_equals(cells: Sequence[Cell], document: Document) -> None:
    """Raises ConfigError for two cells of one configuration."""
    known: dict[str, Cell] = {}
    for cell in cells:
        if cell.key in known:
            other = known[cell.key].title
            raise ConfigError(
                f"{locate(document.where, f'cells.{cell.name}')}cells.{cell.name}: {cell.title} is the same "
                f"configuration as {other}; change a key that decides something, or leave one out"
            )
        known[cell.key] = cell


def _check_figures(question: Question, cells: Sequence[Cell], decode: Document | None, document: Document) -> None:
    """Raises ConfigError for a figure whose data this ablation does not make."""
    scales = {cell.scale for cell in cells}
    for i, name in enumerate(question.figures):
        needs = FIGURES[name]
        place = f"{locate(document.where, f'figures.{i}')}figures: {name!r} needs"
        if needs.scales and len(scales) == 1:
            raise ConfigError(f"{place} several data scales, the ablation has {show(sorted(scales))}; add scales")
        if needs.decode and decode is None:
            raise ConfigError(f"{place} decoded speed-ups, the ablation has no decode section; add one")


def _with_settings(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with those keys that vary among them."""
    flat = [flatten({k: v for k, v in cell.config.plain.items() if k not in SHOWN}) for cell in cells]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    varied = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    pairs = zip(cells, flat, strict=True)
    return [replace(cell, settings={key: one.get(key, "") for key in varied}) for cell, one in pairs]
