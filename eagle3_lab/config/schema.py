"""Signatures as the schema: which keys a class takes, of which types, and which class a name means.

The only module that looks inside jsonargparse. It uses two private things of it, `ActionTypeHint` and its `_typehint`,
because they are the signature as jsonargparse will check it (`**kwargs` followed, annotations resolved); the project
pins `jsonargparse>=4.53,<5`, and the table test in tests/test_config.py notices if they move.
"""

from __future__ import annotations

import collections.abc
import copy
import functools
import inspect
import json
import types
from argparse import ArgumentError
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, Unset, set_parsing_settings
from jsonargparse._typehints import ActionTypeHint
from jsonargparse.typing import register_type

from eagle3_lab.config.importing import NoPartError, allow, import_path
from eagle3_lab.errors import near

Kind: TypeAlias = Any
"""A type as an annotation has it: a class, a union, a generic alias. There is no type for that."""


@functools.cache
def settings() -> None:
    """Set what is process-wide in jsonargparse, once and before the first parser.

    Without `unset_sentinel` null passes for any type; without `is_pure_dataclass` a null for a dataclass slot passes
    and a dataclass cannot be subclassed (and one marked @final cannot be a default); without the third a mapping for
    `Any` that looks like a part is built; without the fourth any text might be imported (see `importing`).
    """
    import torch  # here, so that mistakes in files are told before torch is loaded

    set_parsing_settings(
        unset_sentinel=True,
        subclasses_enabled=["is_pure_dataclass", "is_final_class"],
        instantiate_subclass_spec_in_any=False,
        import_path_denylist=["*"],
        import_path_allowlist=["eagle3_lab", "torch"],
    )
    register_type(torch.dtype, str, _dtype, deserializer_exceptions=(TypeError,))
    register_type(torch.device, str, torch.device, deserializer_exceptions=(RuntimeError,))


def _dtype(text: str) -> torch.dtype:
    import torch

    value = vars(torch).get(str(text).removeprefix("torch."))
    if not isinstance(value, torch.dtype):
        raise TypeError(f"no dtype {text}")
    return value


@dataclass(frozen=True)
class Slot:
    """One parameter of a signature. `default` is in jsonargparse's form: a part is `{class_path, init_args}`."""

    type: Kind
    default: Any
    required: bool


@functools.cache
def parser_for(signature: type | Callable[..., Any], skip: frozenset[str] = frozenset()) -> ArgumentParser:
    """Return the parser of a class's or a function's keyword arguments, without those in `skip`.

    Raises: `TypeError` for a parameter without annotation: nothing could be checked then.
    """
    settings()
    parser = ArgumentParser(exit_on_error=False)
    try:
        defaults = (parameter.default for parameter in inspect.signature(signature).parameters.values())
        allow(signature.__module__, *(type(default).__module__ for default in defaults))
        if isinstance(signature, type):
            parser.add_class_arguments(signature, skip=set(skip), fail_untyped="all")
        else:
            parser.add_function_arguments(signature, skip=set(skip), fail_untyped="all")
    except ValueError as error:
        raise TypeError(f"{signature.__qualname__} cannot be configured: {error}") from error
    return parser


@functools.cache
def slots(signature: type | Callable[..., Any], skip: frozenset[str] = frozenset()) -> dict[str, Slot]:
    """Return the parameters of a class or function by name. Raises: as `parser_for`."""
    found = {
        action.dest: Slot(action._typehint, as_tree(action.default), bool(action.required))
        for action in parser_for(signature, skip)._actions
        if isinstance(action, ActionTypeHint)
    }
    for slot in found.values():
        allow(*_class_paths(slot.default))
    return found


def _class_paths(default: Any) -> Iterator[str]:  # noqa: ANN401 - of whatever type
    """The class paths in a default, which come from code."""
    if isinstance(default, dict):
        if "class_path" in default:
            yield default["class_path"]
        for value in default.values():
            yield from _class_paths(value)
    elif isinstance(default, list | tuple):
        for value in default:
            yield from _class_paths(value)


def own_defaults(signature: type, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the defaults that a class itself declares, for those of its parameters that have one."""
    return {name: slot.default for name, slot in slots(signature, skip).items() if slot.default is not Unset}


def is_part(kind: Kind) -> bool:
    """Whether a type (no union) is a class that YAML names, as opposed to a plain value such as int, Path or dtype.

    Protocols are left to jsonargparse: what implements them cannot be listed.
    """
    if not ActionTypeHint.is_subclass_typehint(kind, also_closed=True):
        return False
    return not vars(_origin_class(kind)).get("_is_protocol", False)


def _origin_class(kind: Kind) -> type:
    return get_origin(kind) or kind


def factory_of(kind: Kind) -> tuple[Kind, int] | None:
    """For `Callable[[...], Part]`: the part and how many of its parameters the caller fills in; else None."""
    if get_origin(kind) is not collections.abc.Callable or not ActionTypeHint.is_return_subclass_typehint(kind):
        return None
    arguments, result = get_args(kind)
    return result, len(arguments) if isinstance(arguments, list) else 0


def members(kind: Kind) -> tuple[Kind, ...]:
    """Return the alternatives of a type: of a union its members, else the type itself."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(member for sub in get_args(kind) for member in members(sub))
    return (kind,)


def base_classes(kind: Kind) -> tuple[type, ...]:
    """Return the classes below which a part for this type may be chosen."""
    bases = []
    for member in members(kind):
        factory = factory_of(member)
        for part in members(factory[0]) if factory else (member,):
            if is_part(part):
                bases.append(_origin_class(part))
    return tuple(bases)


def contained_bases(kind: Kind) -> tuple[type, ...]:
    """Return `base_classes` of a type and of what its lists and mappings hold."""
    inner = [sub for member in members(kind) if not factory_of(member) for sub in get_args(member)]
    below = [base for sub in inner if sub is not Ellipsis for base in contained_bases(sub)]
    return tuple(dict.fromkeys([*base_classes(kind), *below]))


def choices(bases: tuple[type, ...]) -> list[type]:
    """Return the classes that can be named for a slot: imported, not abstract, not private, not local."""
    found: dict[type, None] = {}
    for base in bases:
        for cls in _family(base):
            private = any(name.startswith("_") for name in f"{cls.__module__}.{cls.__qualname__}".split("."))
            if not inspect.isabstract(cls) and not private and "<locals>" not in cls.__qualname__:
                found[cls] = None
    return list(found)


def _family(base: type) -> Iterator[type]:
    yield base
    for cls in type.__subclasses__(base):
        yield from _family(cls)


@functools.cache
def _moved() -> dict[str, str]:
    """Return the import paths that parts had in version 0.1.0, each with the one of today."""
    return json.loads(Path(__file__).with_name("moved.json").read_text())


def find_class(name: object, bases: tuple[type, ...]) -> type:
    """Return the class that a name in YAML means: a short name among `choices`, or a dotted path.

    Raises: `NoPartError`.
    """
    what = " or ".join(base.__name__ for base in bases)
    if not isinstance(name, str):
        raise NoPartError(f"expected the name of a class, got {name!r}")
    if name in _moved():
        new = _moved()[name]
        raise NoPartError(f"{name!r} has moved to {new}; write {new.rpartition('.')[2]}, the class name alone")
    legal = choices(bases)
    if "." not in name:
        found = [cls for cls in legal if cls.__name__ == name]
        if len(found) > 1:
            paths = ", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in found)
            raise NoPartError(f"{name!r} is the name of {len(found)} classes; write one of {paths}")
        if not found:
            raise NoPartError(f"{name!r} is no {what}{near(name, [cls.__name__ for cls in legal])}")
        cls = found[0]
    else:
        known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in legal}
        cls = known[name] if name in known else import_path(name, bases)
    names = [cls.__name__ for cls in legal]
    if not isinstance(cls, type):
        raise NoPartError(f"{name!r} is no class but a {type(cls).__name__}{near(name, names)}")
    if not issubclass(cls, bases):
        raise NoPartError(f"{name!r} is no {what}{near(cls.__name__, names)}")
    if inspect.isabstract(cls):
        raise NoPartError(f"{name!r} is abstract{near(cls.__name__, names)}")
    allow(cls.__module__, *([name] if "." in name else []))
    return cls


def imports(kind: Kind) -> bool:
    """Whether a text or a mapping given for a type, or within it, would be imported as a function, a class or a module
    of any kind: of functions (but for `factory_of`), of `type`, modules and protocols."""
    if kind in (Callable, type, types.ModuleType) or get_origin(kind) is type:
        return True
    if get_origin(kind) is collections.abc.Callable:
        return factory_of(kind) is None
    if isinstance(kind, type) and vars(kind).get("_is_protocol", False):
        return True
    return any(imports(part) for part in get_args(kind) if part is not Ellipsis)


def fits(value: object, kind: Kind) -> bool:
    """Whether jsonargparse takes a value for a type."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_object({"value": copy.deepcopy(value)})
    except ArgumentError:
        return False
    return True


def as_tree(value: Any) -> Any:  # noqa: ANN401 - what is no Namespace goes through
    """Turn jsonargparse's Namespaces into dicts, leaving every other value as it is."""
    if isinstance(value, Namespace):
        return {key: as_tree(item) for key, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: as_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_tree(item) for item in value) if type(value) in (list, tuple) else value
    return value
