"""From a plain dict to a checked and complete configuration: every key legal, every value of its type.

jsonargparse is the judge of values; `Walk` goes over the tree before it, and once more to explain a refusal.
"""

from __future__ import annotations

import copy
import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jsonargparse import Namespace

from eagle3_lab.config import schema
from eagle3_lab.config.composing import Composed
from eagle3_lab.config.reading import Node, join, show
from eagle3_lab.config.walking import Walk
from eagle3_lab.config.wording import names_of, words
from eagle3_lab.config.writing import plain, to_yaml
from eagle3_lab.errors import ConfigError, near

T = TypeVar("T")

CONFIG_FIELD = "config"
"""A parameter of this name of an experiment's class is no key of the YAML: `build` fills it with the `Config`."""


@dataclass(frozen=True)
class Config(Generic[T]):
    """An experiment's configuration, checked against `into` and complete; nothing has been built yet.

    composed: where it came from (`composed.raw_yaml` is the file to run again).
    parsed: every parameter with its value, defaults included, as jsonargparse has it.
    """

    into: type[T]
    composed: Composed
    parsed: Namespace

    @property
    def plain(self) -> dict[str, Any]:
        """The whole configuration as dicts, lists and scalars, with full class paths: what content keys hash."""
        return plain(self.parsed)

    @property
    def yaml(self) -> str:
        """What `--print_config` prints. Read back it gives an equal configuration and the identical text."""
        return to_yaml(self.parsed)

    @property
    def logged_yaml(self) -> str:
        """`yaml` with the values that came from the environment left as written: what a run logs."""
        return to_yaml(self.parsed, masked=self.composed.masked)


def check(composed: Composed, into: type[T], *, also: Sequence[str] = ()) -> Config[T]:
    """Check a composed experiment against the signature of `into` and fill in every default.

    `also` are names that are legal in the place of a top-level key but not in a file, a verb's options; they only
    help to name the nearest word.

    Raises: `ConfigError` for unknown, missing and wrong keys, values and classes; `TypeError` for a class that
    cannot be configured (a parameter without annotation).
    """
    skip = not_in_yaml(into)
    walk = Walk(composed, also=also)
    tree = walk.arguments(composed.tree, into, key="", default={}, skip=skip)
    try:
        parsed = schema.parser_for(into, skip).parse_object(copy.deepcopy(tree))
    except ArgumentError as error:
        walk.values_too = True
        walk.arguments(composed.tree, into, key="", default={}, skip=skip)
        raise walk.error(*_floor(str(error))) from None
    lost = _lost(composed.tree, schema.as_tree(parsed), "")
    if lost is not None:
        raise walk.error(lost, "unknown key")
    return Config(into, composed, parsed)


def check_options(verb: Callable[..., Any], options: Mapping[str, str | None]) -> dict[str, Any]:
    """Check a verb's own options, given as texts (None: the bare option, true for a bool); return all of them.

    Raises: `ConfigError` naming the option.
    """
    subject = subject_of(verb)
    slots = schema.slots(verb, subject)
    texts: dict[str, str] = {}
    for name, text in options.items():
        option = f"--{name.replace('_', '-')}"
        kind = slots[name].type
        if text is None and bool not in schema.members(kind):
            raise ConfigError(f"{option}: needs a value, {words(kind)}")
        texts[name] = "true" if text is None else text
        if not schema.fits(texts[name], kind):
            close = near(texts[name], names_of(kind), otherwise="")
            raise ConfigError(f"{option}: expected {words(kind)}, got {show(text)}{close}")
    for name, slot in slots.items():
        if slot.required and name not in texts:
            raise ConfigError(f"--{name.replace('_', '-')}: missing")
    parser = schema.parser_for(verb, subject)
    return dict(vars(parser.instantiate(parser.parse_object(dict(texts)))))


def subject_of(verb: Callable[..., Any]) -> frozenset[str]:
    """The first parameter of a verb, an experiment or an ablation: what a file says, and no option."""
    return frozenset(list(inspect.signature(verb).parameters)[:1])


def not_in_yaml(into: type) -> frozenset[str]:
    return frozenset({CONFIG_FIELD} & inspect.signature(into).parameters.keys())


def _floor(text: str) -> tuple[str, str]:
    """What remains of jsonargparse's own message: the key, without list index, and the last line."""
    return ".".join(re.findall(r'Parser key "(.+?)"', text)), text.splitlines()[-1].strip()


def _lost(given: Node, result: Node, key: str) -> str | None:
    """Return the key of the first thing in the input that is not in the result, or None."""
    if isinstance(given, list) and isinstance(result, list):
        pairs = [(str(i), item, result[i]) for i, item in enumerate(given) if i < len(result)]
    elif isinstance(given, dict) and isinstance(result, dict):
        if "class_path" in result and "class_path" not in given and "init_args" not in given:
            result = result.get("init_args", {})
        for name in given:
            if name not in result and given[name] is not None and (name, given[name]) != ("init_args", {}):
                return join(key, name)
        pairs = [(name, item, result[name]) for name, item in given.items() if name in result]
    else:
        return None
    return next((lost for name, item, now in pairs if (lost := _lost(item, now, join(key, name)))), None)
