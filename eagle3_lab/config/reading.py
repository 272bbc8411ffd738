"""Files: reads an experiment and the files that it names, and remembers on which line each key was written.

Knows YAML, folders and nothing else: no types, no classes, no interpolation. The result of reading is a `Document`,
a tree of dicts, lists and scalars as written, beside a table `where` from dotted keys to "file:line".

In dotted keys (`model.losses.0.weight`) the word `init_args` is left out, because a part may be written with it or
without it and the user means the same key.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3_lab.errors import ConfigError, near
from eagle3_lab.system.files import is_file, is_folder

Node: TypeAlias = Any
"""A tree as YAML has it: a dict with text keys, a list or a scalar. (A recursive type would help no checker.)"""

TEXT_TAG = "tag:yaml.org,2002:str"
NULL_TAG = "tag:yaml.org,2002:null"

NAMING = ("head", "start")
"""Keys whose text names an experiment for the head that it trained: its content stays where it is."""

FREE = ("budgets", "cells", "device_map", "laws", "let", "methods")
"""Keys of mappings whose names the user chooses: no name in them is a class."""

CLASS = re.compile(r"(\w+\.)*[A-Z]\w*")
"""The name of a class, or its dotted path."""

LONGEST = 255
"""Bytes of a file's name, on most file systems."""

MOST_NODES = 100_000
"""No experiment is as large; a few lines of aliases are."""

MOST_ITEMS = 4096
"""Values of one list: no part takes more, and jsonargparse's time for a list may grow with the square of its length."""

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Document:
    """A tree as it was written, and where each of its keys was written.

    `tree` holds dicts with text keys, lists and scalars, with `${...}` unresolved and file references replaced by
    the content of the files, and parts in long form. `where` maps dotted keys (without `init_args`) to "file:line".
    Neither is changed after reading; the functions of `editing` return new documents.
    """

    tree: dict[str, Any]
    where: dict[str, str] = field(default_factory=dict)

    def at(self, key: str) -> Document:
        """Return the part below a dotted key as a document of its own, such as one cell of an ablation.

        Raises: `ConfigError` if nothing is there or if it is no mapping.
        """
        node: Node = self.tree
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(f"{locate(self.where, key)}{key}: expected a mapping, got {show(node)}")
        below = f"{key}."
        return Document(node, {k.removeprefix(below): v for k, v in self.where.items() if k.startswith(below)})


def read(path: Path, *, root: Path | None = None) -> Document:
    """Read a YAML file and replace every text that ends in `.yaml` by the content of the file it names, but under the
    keys of NAMING. A part in short form, ``{Chain: {length: 3}}``, becomes ``{class_path: Chain, init_args: {length:
    3}}``.

    A reference is looked for beside the file that names it and in that folder's parents up to one called `experiments`,
    then likewise in `root` (default: the folder of `path`) and its parents.

    Raises: `ConfigError` for a file that is missing, is no YAML, holds no mapping or includes itself, for keys that
    are no text, duplicate keys, tabs, and malformed `${...}`.
    """
    where: dict[str, str] = {}
    tree = _Reader(path.parent if root is None else root, where).file(path, key="", chain=())
    if not isinstance(tree, dict):
        raise ConfigError(f"{label(path)}: expected a mapping at the top, got a list")
    if not tree:
        raise ConfigError(f"{label(path)}: is empty; an experiment names at least target, data and model")
    return Document(tree, where)


def include(value: Node, *, key: str, root: Path, where: dict[str, str]) -> Node:
    """Replace the file references in a value from the command line, as `read` does; they may also be relative to where
    one stands.

    `where` gains the lines of the files that were read. Raises: `ConfigError` as `read`.
    """
    if isinstance(value, str) and key.rpartition(".")[2] in NAMING:
        return value
    return _Reader(root, where).expand(value, key=key, file=None, chain=())


def find_experiment(path: Path) -> Path:
    """Return `path`, or the experiment of that name that is shipped with the package.

    `experiments/eagle3.yaml` and `eagle3.yaml` both name the shipped one if there is no such file here. In a wheel
    the experiments lie inside the package, in a checkout beside it.

    Raises: `ConfigError` with the nearest name, or the list of names.
    """
    if len(path.name.encode()) > LONGEST:
        raise ConfigError(f"{path.name[:40]}...: no file has a name of {len(path.name.encode())} bytes")
    if is_file(path):
        return path
    tail = path.relative_to("experiments") if path.parts[:1] == ("experiments",) else path
    for folder in _shipped():
        if is_file(folder / tail):
            return folder / tail
    names: dict[str, str] = {}
    for folder in _shipped():
        names |= {file.stem: str(Path("experiments") / file.relative_to(folder)) for file in _experiments(folder)}
    for folder in (path if is_folder(path) else path.parent, Path("experiments")):
        names |= {file.stem: label(file) for file in _experiments(folder)}
    there = f"; there are: {', '.join(sorted(set(names.values())))}" if names else ""
    if is_folder(path):
        raise ConfigError(f"{path}: is a folder, name a file{there}")
    # stems are compared, so that `fit eagle3` is understood; the answer is a path that can be pasted
    close = difflib.get_close_matches(path.stem, names, n=1)
    raise ConfigError(f"no file {path}{f'; did you mean {names[close[0]]!r}?' if close else there}")


def locate(where: Mapping[str, str], key: str, *, otherwise: str = "") -> str:
    """Return "file:line: " for the longest known beginning of a dotted key, or `otherwise` where nothing is known."""
    names = plain_key(key).split(".")
    for length in range(len(names), 0, -1):
        place = where.get(".".join(names[:length]))
        if place is not None:
            return f"{place}: "
    return f"{otherwise}: " if otherwise else ""


def plain_key(key: str) -> str:
    """Leave `init_args` out of a dotted key, the form in which `where` and messages have it."""
    return ".".join(name for name in key.split(".") if name != "init_args")


def join(key: str, name: str | int) -> str:
    """Return the dotted key of the child `name` of `key`; the top has the key ""."""
    return f"{key}.{name}" if key else str(name)


def label(path: Path) -> str:
    """Return how a file is called in messages: relative to the working folder if it lies in it."""
    here = Path.cwd()
    full = Path(os.path.normpath(here / path))
    return str(full.relative_to(here) if full.is_relative_to(here) else full)


def show(value: object) -> str:
    """Return a value as a message shows it: as YAML would have it, on one line, cut if long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return brief(repr(value))


def brief(text: str) -> str:
    """Return a text on one line, cut if long."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def shipped_experiments() -> list[str]:
    """The experiments that come with the package, by their files' names below `experiments/`."""
    return sorted({str(file.relative_to(folder)) for folder in _shipped() for file in _experiments(folder)})


def _shipped() -> Iterator[Path]:
    yield PACKAGE / "experiments"
    if (PACKAGE.parent / "pyproject.toml").is_file():  # a checkout; in site-packages the folder would be a stranger's
        yield PACKAGE.parent / "experiments"


def _experiments(folder: Path) -> list[Path]:
    """The YAML files of a folder that can be run: those in folders called `common` and `data` are parts of them."""
    if not is_folder(folder):
        return []
    deep = folder.rglob("*.yaml") if folder.name == "experiments" else folder.glob("*.yaml")
    return sorted(file for file in deep if file.parent.name not in ("common", "data"))


class _Reader:
    """Reads files recursively; `where` is filled on the way, under the key at which a file is included."""

    def __init__(self, root: Path, where: dict[str, str]) -> None:
        self.root = root
        self.where = where
        self._nodes = 0

    def file(self, path: Path, *, key: str, chain: tuple[Path, ...]) -> Node:
        full = path.resolve()
        if full in chain:
            raise ConfigError(f"{label(path)}: includes itself ({' -> '.join(p.name for p in (*chain, full))})")
        tree = self._parse(path, key)
        return self.expand(tree, key=key, file=path, chain=(*chain, full))

    def expand(self, node: Node, *, key: str, file: Path | None, chain: tuple[Path, ...]) -> Node:
        if isinstance(node, dict):
            for name in node:
                if not isinstance(name, str):
                    place = locate(self.where, key, otherwise="" if file is None else label(file))
                    raise ConfigError(
                        f"{place}{plain_key(key)}{': ' if key else ''}key {name!r} is no text; write '{name}'"
                    )
            if (name := short_form(node, key)) is not None:
                return {
                    "class_path": name,
                    "init_args": self.expand(node[name] or {}, key=key, file=file, chain=chain),
                }
            return {
                k: v if k in NAMING and isinstance(v, str) else self.expand(v, key=join(key, k), file=file, chain=chain)
                for k, v in node.items()
            }
        if isinstance(node, list):
            if key and len(node) > MOST_ITEMS:
                place = f"--{key}: " if file is None else f"{locate(self.where, key)}{plain_key(key)}: "
                raise ConfigError(f"{place}a list of {len(node)} values; at most {MOST_ITEMS} are taken")
            return [self.expand(v, key=join(key, i), file=file, chain=chain) for i, v in enumerate(node)]
        if isinstance(node, str) and node.endswith(".yaml"):
            return self.file(self._find(node, key, file), key=key, chain=chain)
        return node

    def _find(self, name: str, key: str, file: Path | None) -> Path:
        place = f"--{key}: " if file is None else locate(self.where, key) + f"{plain_key(key)}: "
        if "${" in name:
            raise ConfigError(f"{place}a file reference holds no interpolation, got {name!r}")
        folders = [Path()] if file is None else _up_to_experiments(file.parent)
        folders += _up_to_experiments(self.root)
        for folder in folders:
            if is_file(folder / name):
                return folder / name
        missing = next((f / name for f in folders if is_folder((f / name).parent)), self.root / name)
        beside = missing.parent.glob("*.yaml") if is_folder(missing.parent) else ()
        there = [file.name for file in beside if file.is_file()]
        raise ConfigError(f"{place}no file {label(missing)}{near(missing.name, there, otherwise='there are')}")

    def _parse(self, path: Path, key: str) -> Node:
        name, text = label(path), _text(path)
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None:
                self._mark(node, name, key)
            if isinstance(node, yaml.ScalarNode):
                raise ConfigError(f"{name}: expected a mapping at the top, got {show(node.value)}")
            # OmegaConf's own reader: it takes 1e-4 for a number and refuses duplicate keys, plain PyYAML does neither
            return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            said = error.problem or "is no YAML"
            if said.startswith("but "):  # half a sentence, the other half is the context
                said = f"{error.context}, {said}"
            raise ConfigError(f"{name}{line}: {said}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
        except OmegaConfBaseException as error:
            below = join(key, dotted(error.full_key)) if error.full_key else key
            raise ConfigError(f"{locate(self.where, below, otherwise=name)}{below}: {first_line(error)}") from None
        except RecursionError:
            raise ConfigError(f"{name}: is nested too deeply, or an alias (*name) stands within itself") from None
        except ValueError as error:  # a number of thousands of digits
            raise ConfigError(f"{name}: {first_line(error).partition(':')[0]}") from None

    def _mark(self, node: yaml.Node, file: str, key: str) -> None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            line = node.start_mark.line + 1
            raise ConfigError(f"{file}:{line}: more than {MOST_NODES} values; aliases (*name) of aliases multiply")
        if isinstance(node, yaml.MappingNode):
            self._mark_mapping(node, file, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.where[plain_key(join(key, index))] = f"{file}:{item.start_mark.line + 1}"
                self._mark(item, file, join(key, index))

    def _mark_mapping(self, node: yaml.MappingNode, file: str, key: str) -> None:
        names = {name.value: _outline(value) for name, value in node.value if isinstance(name, yaml.ScalarNode)}
        if short_form(names, key) is not None and len(node.value) == 1:
            ((name, options),) = node.value
            self.where[plain_key(join(key, "class_path"))] = f"{file}:{name.start_mark.line + 1}"
            self._mark(options, file, key)
            return
        # `<<` first: what is written beside it is stronger
        for name, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if name.value == "<<":
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self._mark(merged, file, key)
                continue
            line = name.start_mark.line + 1
            if name.tag != TEXT_TAG:
                raise ConfigError(f"{file}:{line}: key {show(name.value)} is no text; put it in quotes")
            below = join(key, name.value)
            if name.value != "init_args":
                self.where[plain_key(below)] = f"{file}:{line}"
            self._mark(value, file, below)


def short_form(node: Mapping[Any, Node], key: str) -> str | None:
    """Return the class of a part in short form, ``{Chain: {length: 3}}``: a mapping with one key, the name of a class
    and not one of FREE's, whose value is a mapping, a reference to one, or null. None for any other mapping."""
    if len(node) != 1 or plain_key(key).rpartition(".")[2] in FREE:
        return None
    (name, options), *_ = node.items()
    reference = isinstance(options, str) and ("${" in options or options.endswith(".yaml"))
    is_part = isinstance(options, dict) or options is None or reference
    return name if is_part and isinstance(name, str) and CLASS.fullmatch(name) else None


def _outline(node: yaml.Node) -> Node:
    """Return what `short_form` reads of a value: a scalar's text (null: None), or an empty mapping or list."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL_TAG else node.value
    return {} if isinstance(node, yaml.MappingNode) else []


def _up_to_experiments(folder: Path) -> list[Path]:
    """A folder and its parents up to one called `experiments`; itself alone where none is."""
    parents = [folder, *folder.resolve().parents]
    stop = next((i for i, one in enumerate(parents) if one.resolve().name == "experiments"), 0)
    return parents[: stop + 1]


def _text(path: Path) -> str:
    """The content of a file. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label(path)}: is no UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{label(path)}: cannot be read: {error}") from None


def dotted(full_key: str) -> str:
    """Turn OmegaConf's `losses[0].weight` into `losses.0.weight`."""
    return full_key.replace("[", ".").replace("]", "").removeprefix(".")


def first_line(error: Exception) -> str:
    """Return the line of a library's message that matters; the lines after it repeat the key."""
    return str(error).splitlines()[0].strip()
