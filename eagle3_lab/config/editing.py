"""Changes to a document: an ablation's overlay, and one dotted override.

Both know the two ways in which a part is written, `Name` and `{class_path: Name, init_args: {...}}`, and step through
`init_args` so that a user never has to write it; neither knows a type. Two rules hold for both: a change of class
drops the old class's init_args, and a list is replaced whole (an override may still name one element by its index).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3_lab.config.reading import Document, Node, first_line, include, join, plain_key, show
from eagle3_lab.errors import ConfigError, near

LONG_FORM = frozenset({"class_path", "init_args"})
COMMAND_LINE = "command line"

Holder: TypeAlias = Any
"""A dict or a list that holds the child under a slot."""
Slot: TypeAlias = Any
"""A key of the dict or an index of the list."""


def overlay(base: Document, patch: Document) -> Document:
    """Lay a patch over a document and return the result; neither argument is changed.

    Mappings are merged key by key; scalars, lists and bare class names replace what was there. A mapping laid over a
    part sets its init_args, whether or not it says so. A mapping that names another class replaces the part whole
    (classes are compared by the last component of their paths: `SoftCE` is `eagle3_lab.training.loss.unrolled.SoftCE`).

    Raises: `ConfigError` for a mapping laid over a `${...}`: what it points to must be changed instead.

    >>> base = Document({"model": {"features": {"class_path": "Fused", "init_args": {"width": 3}}}})
    >>> overlay(base, Document({"model": {"features": {"width": 4}}})).tree
    {'model': {'features': {'class_path': 'Fused', 'init_args': {'width': 4}}}}
    >>> overlay(base, Document({"model": {"features": "Top"}})).tree
    {'model': {'features': 'Top'}}
    """
    where = dict(base.where)
    tree = _lay(copy.deepcopy(base.tree), copy.deepcopy(patch.tree), "", patch, where)
    return Document(tree, where)


def override(document: Document, key: str, text: str, *, root: Path) -> Document:
    """Set one dotted key to the value that `text` means in YAML and return the new document.

    List elements are named by index. Branches that do not exist are created (whether their names are legal is
    checked later, with types at hand), except below `let:`, where an unused name would do nothing. A text that ends
    in `.yaml` is read as a file, from `root` (the experiment's folder) or from here.

    Raises: `ConfigError` for an index out of range, for a step into a scalar or into a `${...}`, and as `include`.
    """
    names = key.split(".")
    if not all(names):
        raise ConfigError(f"--{key}: expected names with single dots between them")
    tree, where = copy.deepcopy(document.tree), dict(document.where)
    if names[0] == "let" and len(names) > 1:
        known = tree.get("let")
        if not isinstance(known, dict) or names[1] not in known:
            raise ConfigError(f"--{key}: nothing is called so below let{near(names[1], known or ())}")
    written = _forget(where, key)
    value = include(_value_of(key, text), key=written, root=root, where=where)
    where[written] = COMMAND_LINE
    holder: Holder = {"": tree}
    slot: Slot = ""
    for depth, name in enumerate(names):
        at = ".".join(names[:depth])
        if _child(holder, slot) is None:
            where[plain_key(at)] = COMMAND_LINE  # a branch that this override creates
        holder, slot = _step(holder, slot, name, option=key, at=at)
    if slot == "class_path" and _class_name(holder.get("class_path")) != _class_name(value):
        holder.clear()  # with what a part written in short form held: it belonged to the old class, too
        _forget(where, key.removesuffix(".class_path"), itself=False)
        where[written] = COMMAND_LINE
    holder[slot] = value
    return Document(tree, where)


def _lay(base: Node, patch: Node, key: str, source: Document, where: dict[str, str]) -> Node:
    if isinstance(base, str) and isinstance(patch, dict) and not LONG_FORM & patch.keys() - {"init_args"}:
        if "${" in base:
            raise ConfigError(f"{source.where.get(key, 'overlay')}: {key}: is {show(base)}; change what it points to")
        base = {"class_path": base}
    if not isinstance(base, dict) or not isinstance(patch, dict) or _changes_class(base, patch):
        _forget(where, key)
        below = f"{key}."
        where |= {k: v for k, v in source.where.items() if k.startswith(below)}
        where[key] = source.where.get(key, "overlay")
        return patch
    if "class_path" in base and not LONG_FORM & patch.keys():
        patch = {"init_args": patch}
    elif "class_path" not in base and "init_args" in patch:
        patch = patch["init_args"] or {}
    for name, value in patch.items():
        if name == "init_args":
            base[name] = _lay(base.get(name) or {}, value or {}, key, source, where)
        else:
            base[name] = _lay(base.get(name), value, join(key, name), source, where)
    return base


def _changes_class(base: dict[str, Any], patch: dict[str, Any]) -> bool:
    return "class_path" in patch and _class_name(patch["class_path"]) != _class_name(base.get("class_path"))


def _class_name(path: object) -> str:
    return str(path).rpartition(".")[2]


def _step(holder: Holder, slot: Slot, name: str, *, option: str, at: str) -> tuple[Holder, Slot]:
    """Step from `holder[slot]` to its child `name`; returns where the child is held, and under which key."""
    node: Node = _child(holder, slot)
    if node is None:
        node = holder[slot] = {}
    if isinstance(node, str):
        if "${" in node:
            raise ConfigError(f"--{option}: {at} is {show(node)}; change what it points to")
        node = holder[slot] = {"class_path": node}
    if isinstance(node, list):
        if not name.isdecimal() or int(name) >= len(node):
            raise ConfigError(f"--{option}: {at} is a list of {len(node)}, {name!r} is no index of it")
        return node, int(name)
    if not isinstance(node, dict):
        raise ConfigError(f"--{option}: {at} is {show(node)} and holds no key {name!r}")
    if "class_path" in node and name not in LONG_FORM:
        node["init_args"] = node.get("init_args") or {}
        return node["init_args"], name
    if name == "init_args" and "class_path" not in node:
        return holder, slot
    return node, name


def _child(holder: Holder, slot: Slot) -> Node:
    return holder[slot] if isinstance(holder, list) else holder.get(slot)


def _forget(where: dict[str, str], key: str, *, itself: bool = True) -> str:
    """Drop what is known about a key and all below it; returns the key as `where` has it."""
    written = plain_key(key)
    for known in [k for k in where if k.startswith(f"{written}.") or (itself and k == written)]:
        del where[known]
    return written


def _value_of(key: str, text: str) -> Node:
    """Read an override's text as OmegaConf reads a value in a file; text that is no YAML means itself."""
    try:
        tree = OmegaConf.to_container(OmegaConf.create(f"v: {text}"), resolve=False)
    except yaml.YAMLError:
        return text
    except OmegaConfBaseException as error:
        raise ConfigError(f"--{key}: {first_line(error)}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"--{key}: {first_line(error).partition(':')[0]}") from None
    return tree["v"] if isinstance(tree, dict) and tree.keys() == {"v"} else text
