"""Keys by content: a configuration reduced to what decides a result, and the hash of it.

Knows no option by name: `key_options` decides. A class of this package counts by its name alone, whatever module it
stands in, so that moving a module changes no key; any other class counts by its full path.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from eagle3_lab.config import schema
from eagle3_lab.config.checking import Config, not_in_yaml
from eagle3_lab.config.key_options import OPTIONS, Decision
from eagle3_lab.config.writing import plain

PACKAGE = __name__.partition(".")[0]

Content = Callable[[Any], object]
"""From an option's value, not null, to what it leads to, as JSON."""


def digest(*parts: object) -> str:
    """Return the hash of ``parts``, which are JSON; 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def short_name(path: str) -> str:
    """Return a class of this package by its name, and any other by its full path."""
    return path.rpartition(".")[2] if path.startswith(f"{PACKAGE}.") else path


def chosen(cls: str, options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return those of a class's options that count in ``key`` as they are written.

        chosen("Features", {"dtype": "float32", "threads": 2}, "training") = {"dtype": "float32"}

    Raises:
        KeyError: an option that `key_options` does not decide about.
    """
    return {name: value for name, value in options.items() if key in OPTIONS[cls][name].values}


def reduced(tree: Any, keys: Collection[str], contents: Mapping[str, Content] | None = None) -> Any:  # noqa: ANN401
    """Return a checked configuration, or a part of it, without what counts in none of ``keys``.

    Args:
        tree: of `Config.plain`: dicts, lists and scalars; parts are ``{class_path, init_args}``.
        keys: of `key_options.KEYS`.
        contents: for options that count by content, called "Class.option": what stands in their place. One that is not
            named here is left out, and whoever asks adds what it leads to.
    """
    given = contents or {}
    if isinstance(tree, dict) and "class_path" in tree:
        cls = str(tree["class_path"])
        own = _decisions(cls)
        kept: dict[str, Any] = {}
        for name, value in (tree.get("init_args") or {}).items():
            decision, option = own.get(name), f"{short_name(cls)}.{name}"
            if decision is None or decision.values & {*keys}:
                kept[name] = reduced(value, keys, given)
            elif decision.contents & {*keys} and option in given:
                kept[name] = None if value is None else given[option](value)
        others = {name: value for name, value in tree.items() if name not in ("class_path", "init_args")}
        return {"class_path": short_name(cls), "init_args": kept, **others}
    if isinstance(tree, dict):
        return {name: reduced(value, keys, given) for name, value in tree.items()}
    if isinstance(tree, list):
        return [reduced(value, keys, given) for value in tree]
    if isinstance(tree, str) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", tree):  # a class or function named as a value
        return short_name(tree)
    return tree


def without_defaults(config: Config) -> dict[str, Any]:
    """Return a checked configuration, as `reduced` takes it, without the options that have their defaults, so that a
    new option with a default changes no key. A text that counts by content stays: what it leads to may change."""
    path = f"{config.into.__module__}.{config.into.__qualname__}"
    return {"class_path": path, "init_args": _changed(config.plain, config.into, not_in_yaml(config.into))}


def _changed(options: Mapping[str, Any], cls: type, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return those options of a class that have not their defaults."""
    defaults = schema.own_defaults(cls, skip)
    decisions = _decisions(f"{cls.__module__}.{cls.__qualname__}")
    changed: dict[str, Any] = {}
    for name, value in options.items():
        stays = name in decisions and decisions[name].contents and isinstance(value, str)
        chosen = _chosen(value)
        if stays or name not in defaults or chosen != _chosen(plain(defaults[name])):
            changed[name] = chosen
    return changed


def _chosen(tree: Any) -> Any:  # noqa: ANN401
    """Return a part of a configuration without defaults."""
    if isinstance(tree, dict) and "class_path" in tree:
        module, _, name = str(tree["class_path"]).rpartition(".")
        cls = vars(importlib.import_module(module))[name]
        return {"class_path": tree["class_path"], "init_args": _changed(tree.get("init_args") or {}, cls)}
    if isinstance(tree, dict):
        return {name: _chosen(value) for name, value in tree.items()}
    return [_chosen(value) for value in tree] if isinstance(tree, list) else tree


def _decisions(path: str) -> Mapping[str, Decision]:
    """Return what is decided about the options of a class of this package; nothing for any other."""
    return OPTIONS.get(short_name(path), {}) if path.startswith(f"{PACKAGE}.") else {}
