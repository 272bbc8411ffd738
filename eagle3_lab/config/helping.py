"""Help that is read off signatures and docstrings: of a verb with its experiment, and of the classes for one key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser

from eagle3_lab.config import schema
from eagle3_lab.config.checking import not_in_yaml, subject_of
from eagle3_lab.config.importing import NoPartError
from eagle3_lab.config.wording import words
from eagle3_lab.errors import ConfigError, near

EPILOG = (
    "Every key can be given as --key value, deeper ones with dots (--model.unroll.depth 3), elements of a list by "
    "index. --print_config shows the whole configuration and stops. --KEY.help lists the classes for a key, "
    "--KEY.help CLASS shows what one of them takes."
)


def verb_help(verb: Callable[..., Any], into: type, *, usage: str) -> str:
    """Return the help of a verb: its docstring, the experiment's keys and its own options, with types and defaults."""
    schema.settings()
    parser = ArgumentParser(usage=usage, description=_summary(verb), epilog=EPILOG)
    parser.add_class_arguments(into, skip=set(not_in_yaml(into)))
    parser.add_function_arguments(verb, skip=set(subject_of(verb)))
    return _text(parser)


def class_help(into: type, *, key: str, name: str | None) -> str:
    """Return what the class `name` takes in the place of `key`; without a name, which classes there are.

    Raises: `ConfigError` for a key that is unknown or holds no part, and for a class that does not belong there.
    """
    bases = _bases_at(into, key)
    if name is None:
        found = sorted(schema.choices(bases), key=lambda cls: cls.__name__)
        if len(found) > 1:
            width = max(len(cls.__name__) for cls in found)
            return "".join(f"{cls.__name__:<{width}}  {_summary(cls)}".rstrip() + "\n" for cls in found)
        name = next((cls.__name__ for cls in found), "")
    try:
        cls = schema.find_class(name, bases)
    except NoPartError as error:
        raise ConfigError(f"--{key}.help: {error}") from None
    schema.settings()
    parser = ArgumentParser(usage=f"{key}: {{{cls.__name__}: {{...}}}}", add_help=False)
    parser.add_class_arguments(cls)
    return _text(parser)


def _bases_at(into: type, key: str) -> tuple[type, ...]:
    """Follow a dotted key through signatures; a slot for an abstract class ends the way, its class is not known."""
    bases: tuple[type, ...] = (into,)
    so_far: list[str] = []
    for name in key.split("."):
        if name in ("init_args", "class_path") or name.isdecimal():
            continue
        concrete = next((base for base in bases if not inspect.isabstract(base)), None)
        if concrete is None:
            raise ConfigError(f"--{key}.help: the class of {'.'.join(so_far)} decides what is below it")
        slots = schema.slots(concrete, not_in_yaml(into) if concrete is into else frozenset())
        so_far.append(name)
        if name not in slots:
            raise ConfigError(f"--{key}.help: {'.'.join(so_far)}: unknown key{near(name, slots)}")
        bases = schema.contained_bases(slots[name].type)
        if not bases:
            kind = words(slots[name].type)
            raise ConfigError(f"--{key}.help: {'.'.join(so_far)} is no part but {kind}")
    return bases


def _summary(documented: type | Callable[..., Any]) -> str:
    """The first paragraph of the thing's own docstring on one line; Python writes a dataclass's signature there."""
    text = inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0]
    return "" if text.startswith(f"{documented.__name__}(") else " ".join(text.split())


def _text(parser: ArgumentParser) -> str:
    # jsonargparse's word for "no default"; it has said "required" before it
    return re.sub(r",\s+default:\s+Unset", "", parser.format_help())
