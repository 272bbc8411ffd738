"""A checked configuration as text: dicts and scalars, and YAML that reads back as the same values."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jsonargparse import Namespace
from omegaconf import OmegaConf

from eagle3_lab.config.reading import Node, join, plain_key


def to_yaml(config: Namespace | Mapping[str, Any], *, masked: Mapping[str, Any] | None = None) -> str:
    """Write a configuration as YAML that reads back as the same values.

    `masked` (`Composed.masked`) puts what it holds of unresolved `${...}` in the place of the values that the
    environment gave. A text that ends in `.yaml` is the one thing that does not come back: it would be read as a file.

    Raises: as `plain`.
    """
    return OmegaConf.to_yaml(OmegaConf.create(_written(plain(config), masked)))


def plain(value: object, *, key: str = "") -> Node:
    """Turn a parsed configuration into dicts, lists and scalars.

    jsonargparse's own dump is not used: it writes a null Path as the text None, and numbers in quotes without them.

    Raises: `TypeError` for a default that is an object (an instance of a part that is no dataclass): its
    arguments are not known, so no file could say it.
    """
    match value:
        case Namespace() | dict():
            items = vars(value) if isinstance(value, Namespace) else value
            return {str(name): plain(item, key=join(key, str(name))) for name, item in items.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item, key=join(key, index)) for index, item in enumerate(value)]
        case enum.Enum():
            return value.name
        case None | bool() | int() | float() | str():
            return value
        case PurePath():
            return str(value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ in ("torch", "datetime", "uuid", "decimal"):
        return str(value)
    raise TypeError(
        f"{plain_key(key)}: the default {value!r} is an object and cannot be written; use None or a dataclass"
    )


def _written(tree: Node, masked: Node) -> Node:
    if isinstance(masked, str) and "${" in masked and masked != tree:
        return masked
    if isinstance(tree, dict):
        below = masked if isinstance(masked, Mapping) else {}
        if "class_path" in tree and below and "class_path" not in below and "init_args" not in below:
            below = {"init_args": below}  # written in short form
        return {name: _written(item, below.get(name)) for name, item in tree.items()}
    if isinstance(tree, list):
        below = masked if isinstance(masked, list) and len(masked) == len(tree) else [None] * len(tree)
        return [_written(item, as_written) for item, as_written in zip(tree, below, strict=True)]
    # OmegaConf would take `${` for its own when it reads the text again
    return tree.replace("${", "\\${") if isinstance(tree, str) else tree
