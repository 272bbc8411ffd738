"""Types in words, for messages."""

from __future__ import annotations

import collections.abc
import enum
import sys
from typing import Literal, get_args, get_origin

from eagle3_lab.config import schema


def words(kind: schema.Kind) -> str:
    """Say a type as a message says it: "int", "Path or null", "one of 'a', 'b'"."""
    if kind is None or kind is type(None):
        return "null"
    if len(schema.members(kind)) > 1:
        return " or ".join(dict.fromkeys(words(member) for member in schema.members(kind)))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(repr(member.name) for member in kind)}"
    if origin is collections.abc.Callable:
        return words(arguments[-1]) if schema.factory_of(kind) else "a function"
    if origin in (list, tuple, set, collections.abc.Sequence) and arguments:
        return f"a list of {', '.join(words(argument) for argument in arguments if argument is not Ellipsis)}"
    if origin in (dict, collections.abc.Mapping):
        return "a mapping"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def names_of(kind: schema.Kind) -> list[str]:
    """Return the words that a Literal, an Enum or a dtype allows, for the nearest-name answer."""
    found: list[str] = []
    for member in schema.members(kind):
        if get_origin(member) is Literal:
            found += [word for word in get_args(member) if isinstance(word, str)]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            found += [item.name for item in member]
        elif isinstance(member, type) and member.__module__ == "torch" and member.__name__ == "dtype":
            found += [name for name, value in vars(sys.modules["torch"]).items() if isinstance(value, member)]
    return found
