"""From a file to one plain, resolved dict: read, overlay, override, resolve.

The order is the point. `${...}` is resolved once, after the overrides, so that an override of a shared number under
`let:` reaches every place that refers to it, in whichever file that place was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from eagle3_lab.config.editing import COMMAND_LINE, overlay, override
from eagle3_lab.config.reading import (
    Document,
    Node,
    brief,
    dotted,
    find_experiment,
    first_line,
    join,
    locate,
    plain_key,
    read,
)
from eagle3_lab.errors import ConfigError, near

# an interpolation that holds one of these depends on the environment, or might
ENVIRONMENT = ("${oc.env:", "${oc.decode:", "${oc.create:")


@dataclass(frozen=True)
class Composed:
    """An experiment as a plain dict, before anything is known about types.

    path: the experiment file that was read.
    tree: dicts, lists and scalars; `${...}` resolved, `let:` gone.
    where: dotted key, without `init_args` -> "file:line", or "command line"; "--key value" where it refers to a value
        that was given there.
    raw_yaml: the same experiment with every `${...}` as written and `let:` kept: one complete file that runs again,
        and that holds no value from the environment.
    masked: `tree` with the values that come from the environment left as written.
    """

    path: Path
    tree: dict[str, Any]
    where: dict[str, str]
    raw_yaml: str
    masked: dict[str, Any]


def compose(
    path: Path | str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    root: Path | None = None,
    patches: Iterable[Document] = (),
) -> Composed:
    """Read an experiment, lay patches over it, apply dotted overrides, and resolve what is left.

    `overrides` are pairs of dotted key and YAML text, `("model.unroll.depth", "3")`, applied in order. `root` is the
    second place where file references are looked for (the first is beside the naming file); default: the
    experiment's own folder.

    Raises: `ConfigError`, one line with file, line, key and the nearest legal name.
    """
    path = find_experiment(Path(path))
    root = path.parent if root is None else root
    document = read(path, root=root)
    for patch in patches:
        document = overlay(document, patch)
    return compose_document(document, path, overrides, root=root)


def compose_document(
    document: Document, path: Path, overrides: Sequence[tuple[str, str]] = (), *, root: Path | None = None
) -> Composed:
    """Apply dotted overrides to a document that was read already, such as one cell of an ablation, and resolve what is
    left. ``path`` is the file it is of. Raises: as `compose`."""
    root = path.parent if root is None else root
    for key, text in overrides:
        document = override(document, key, text, root=root)
    if not isinstance(document.tree.get("let", {}), dict):
        raise ConfigError(f"{locate(document.where, 'let')}let: expected a mapping of shared values")
    return Composed(
        path=path,
        tree=_shared_values_dropped(_resolve(document)),
        where=_followed(document, overrides),
        raw_yaml=OmegaConf.to_yaml(OmegaConf.create(document.tree), resolve=False),
        masked=_shared_values_dropped(_mask(document.tree)),
    )


def parse_overrides(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Split `key=value` texts, with or without leading dashes, into the pairs that `compose` takes.

    Raises: `ConfigError` for a text without `=`.
    """
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{key}: an override is written key=value")
    return [(key, value) for key, _, value in pairs]


def _followed(document: Document, overrides: Sequence[tuple[str, str]]) -> dict[str, str]:
    """`where` of a document, but that a value which refers to an overridden one was written by that override:
    "--key value". References of references count; relative ones (`${.x}`) do not."""
    where = dict(document.where)
    pending = [(key, f"--{key} {brief(text)}") for key, text in overrides]
    while pending:
        name, place = pending.pop()
        refers = re.compile(rf"\$\{{{re.escape(name)}[}}.\[]")
        for key, value in _items(document.tree):
            known = where.get(plain_key(key))
            if isinstance(value, str) and refers.search(value) and known not in (place, COMMAND_LINE):
                where[plain_key(key)] = place
                pending.append((key, place))
    return where


def _resolve(document: Document) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(document.tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = plain_key(dotted(error.full_key or ""))
        text = first_line(error)
        if isinstance(error, MissingMandatoryValue):
            text = "is ??? and must be given"
        elif isinstance(error, InterpolationResolutionError) and " raised while " in text:
            text = text.partition(": ")[2].strip("\"'")  # the resolver's own words, without the exception's class
        elif isinstance(error, InterpolationKeyError):
            wrong = text.partition("'")[2].partition("'")[0]
            text += near(wrong, _keys(document.tree), otherwise="")
        raise ConfigError(f"{locate(document.where, key)}{key}: {text}") from None
    except RecursionError:
        raise ConfigError("an interpolation refers to itself") from None
    return cast(dict[str, Any], tree)


def _mask(tree: dict[str, Any]) -> dict[str, Any]:
    """Resolve all but the values from the environment.

    What is assembled from such a value by another interpolation cannot always be resolved then; the whole tree is
    left as written in that case, which shows too little rather than a secret.
    """

    def escaped(node: Node) -> Node:
        if isinstance(node, dict):
            return {key: escaped(value) for key, value in node.items()}
        if isinstance(node, list):
            return [escaped(value) for value in node]
        if isinstance(node, str) and any(mark in node for mark in ENVIRONMENT):
            return node.replace("${", "\\${")
        return node

    try:
        masked = OmegaConf.to_container(OmegaConf.create(escaped(tree)), resolve=True)
    except OmegaConfBaseException:
        return tree
    return cast(dict[str, Any], masked)


def _shared_values_dropped(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _tidy(value) for key, value in tree.items() if key != "let"}


def _tidy(node: Node) -> Node:
    """Drop empty `init_args:` lines: null there means none, which jsonargparse does not know."""
    if isinstance(node, dict):
        empty = "class_path" in node and node.get("init_args", 0) is None
        return {key: _tidy(value) for key, value in node.items() if not (empty and key == "init_args")}
    return [_tidy(value) for value in node] if isinstance(node, list) else node


def _keys(node: Node) -> Iterator[str]:
    """All dotted keys of a tree as an interpolation has to write them, `init_args` included."""
    return (key for key, _ in _items(node))


def _items(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """All nodes of a tree below its root by their dotted keys, `init_args` included."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in pairs:
        yield join(key, name), value
        yield from _items(value, join(key, name))
