"""What decides a result: an experiment's choices without their defaults, without what only shows or schedules, and
without module paths, so that a renamed module or a new option with a default changes no key."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from jsonargparse import Unset

from eagle3_lab.config import Config, plain, schema
from eagle3_lab.config.checking import not_in_yaml
from eagle3_lab.config.reading import join
from eagle3_lab.data.records import PACKAGE, file_hash, locate
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import SHOWN, Experiment

VERSION = 1
"""Of the key: to be raised when a default changes its meaning, since keys do not hold defaults."""

IDLE = frozenset(
    {
        "features.folder",
        "features.layers",
        "features.threads",
        "model.budget_mib",
        "model.compile",
        "target.device",
        "trainer.check_val_every_n_epoch",
        "trainer.enable_model_summary",
        "trainer.enable_progress_bar",
        "trainer.limit_val_batches",
        "trainer.log_every_n_steps",
        "trainer.num_sanity_val_steps",
        "trainer.save_every_minutes",
        "trainer.val_check_interval",
    }
)
"""Keys that decide how a result is made and shown, and not what it is, but for rounding."""

FILES = (".jsonl", ".jsonl.gz", ".json", ".ckpt")
"""Endings of texts that name a file: it counts by its content."""

CONTENT = "sha256 "


def decisive(config: Config[Experiment]) -> dict[str, Any]:
    """Return what decides the result of an experiment, as dicts, lists and scalars: a part is ``{"class": NAME, ...}``
    with those arguments that differ from its defaults, or the name alone. A file counts by its content."""
    slots = schema.slots(config.into, not_in_yaml(config.into))
    given = {key: value for key, value in config.plain.items() if key not in SHOWN}
    return _arguments(given, slots, "")


def cell_key(config: Config[Experiment]) -> str:
    """Return the identity of an experiment's result, 16 hexadecimal digits."""
    text = json.dumps([VERSION, decisive(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(ours: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return in words what differs first between two results of :func:`decisive`; "" where nothing does."""
    mine, theirs = (dict(_leaves(tree, "")) for tree in (ours, others))
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            return f"{key} {_say(theirs, key)} there, {_say(mine, key)} here"
    return ""


def _say(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "left out"


def _leaves(node: object, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [leaf for name, value in node.items() for leaf in _leaves(value, join(key, name))]
    if isinstance(node, list):
        return [leaf for i, value in enumerate(node) for leaf in _leaves(value, join(key, i))]
    return [(key, node)]


def _arguments(given: Mapping[str, Any], slots: Mapping[str, schema.Slot], key: str) -> dict[str, Any]:
    """Those arguments that differ from their defaults and decide something."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        here = join(key, name)
        if here in IDLE:
            continue
        node = _node(value, here)
        default = slots[name].default if name in slots else Unset
        if default is Unset or node != _node(plain(default), here) or str(node).startswith(CONTENT):
            found[name] = node
    return found


def _node(value: object, key: str) -> Any:  # noqa: ANN401 - JSON has no better type
    if isinstance(value, Mapping):
        if "class_path" in value:
            cls = _class(str(value["class_path"]))
            arguments = _arguments(value.get("init_args") or {}, schema.slots(cls), key)
            name = cls.__name__ if cls.__module__.startswith("eagle3_lab.") else str(value["class_path"])
            return {"class": name, **arguments} if arguments else name
        return {str(name): _node(item, join(key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_node(item, join(key, i)) for i, item in enumerate(value)]
    if isinstance(value, str) and (value.startswith(PACKAGE) or value.endswith(FILES)) and "template" not in key:
        try:
            stat = locate(value).stat()
        except UserError:  # not there yet: the run that needs it says so
            return value
        return CONTENT + _hash_of(value, stat.st_mtime_ns, stat.st_size)
    return value


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return vars(importlib.import_module(module))[name]


@functools.cache
def _hash_of(path: str, changed: int, size: int) -> str:
    return file_hash(path)
