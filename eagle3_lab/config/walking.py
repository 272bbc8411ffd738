"""Beside the types: goes over a tree, completes what jsonargparse would get wrong, and says what is wrong in one line.

Three reasons not to leave it all to jsonargparse. It lets the init_args of a slot's *default* part leak into a part of
another class that is written there (with the default `StaticTree(width=5)`, `grow: DynamicTree` gets width 5). It drops
an unknown key whose value is `{}` without a word. And its messages have no list index and no nearest name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from eagle3_lab.config import schema
from eagle3_lab.config.composing import Composed
from eagle3_lab.config.editing import LONG_FORM
from eagle3_lab.config.importing import NoPartError
from eagle3_lab.config.reading import CLASS, Node, join, label, locate, plain_key, show
from eagle3_lab.config.wording import names_of, words
from eagle3_lab.config.writing import plain
from eagle3_lab.errors import ConfigError, near


class Walk:
    """Goes over a tree beside the types, completes it, and raises the first mistake it meets.

    `values_too` asks jsonargparse about every single value, to name the one that the whole was refused for.
    """

    def __init__(self, composed: Composed, *, also: Sequence[str]) -> None:
        self.composed = composed
        self.also = also
        self.values_too = False

    def error(self, key: str, text: str) -> ConfigError:
        key = plain_key(key)
        place = locate(self.composed.where, key, otherwise=label(self.composed.path))
        return ConfigError(f"{place}{key.removesuffix('.class_path')}: {text}")

    def arguments(
        self, given: Mapping[str, Any], cls: type, *, key: str, default: Mapping[str, Any], skip: frozenset[str]
    ) -> dict[str, Any]:
        """Check and complete the keyword arguments of a class; those in `skip` are not the YAML's business."""
        slots = schema.slots(cls, skip)
        for name in given:
            if name not in slots:
                legal = [*slots, *self.also] if not key else list(slots)
                raise self.error(join(key, name), f"unknown key{near(name, legal)}")
        complete = {}
        for name, slot in slots.items():
            below = default.get(name, slot.default)
            if name in given and schema.imports(slot.type) and _is_default(given[name], below):
                continue
            if name in given:
                complete[name] = self.value(given[name], slot.type, key=join(key, name), default=below)
            elif slot.required and name not in default:
                raise self.error(join(key, name), "missing")
        return complete

    def value(self, node: Node, kind: schema.Kind, *, key: str, default: object) -> Node:
        kinds = schema.members(kind)
        bases = schema.base_classes(kind)
        if isinstance(node, dict):
            mapping = next((k for k in kinds if get_origin(k) in (dict, Mapping) and len(get_args(k)) == 2), None)
            if mapping is not None and not (bases and "class_path" in node):
                of = default if isinstance(default, dict) else {}
                item = get_args(mapping)[1]
                return {k: self.value(v, item, key=join(key, k), default=of.get(k)) for k, v in node.items()}
            if bases:
                return self.part(node, kinds, bases, key=key, default=default)
        if isinstance(node, list):
            items = next((get_args(k) for k in kinds if get_origin(k) in (list, tuple, set, Sequence)), ())
            each = [k for k in items if k is not Ellipsis]
            if each and (len(each) == 1 or len(each) == len(node)):
                return [
                    self.value(v, each[i] if len(each) > 1 else each[0], key=join(key, i), default=None)
                    for i, v in enumerate(node)
                ]
        if isinstance(node, str) and bases and str not in kinds:
            return self.part({"class_path": node}, kinds, bases, key=key, default=default)
        self._judge(node, kind, key)
        return node

    def _judge(self, node: Node, kind: schema.Kind, key: str) -> None:
        """Refuse a value that is no part and holds none."""
        if isinstance(node, float) and not math.isfinite(node):
            raise self.error(key, f"expected a finite number, got {node}")
        if schema.imports(kind) and _names_code(node, kind):
            raise self.error(key, f"a function or a class cannot be given in a YAML, got {show(node)}; leave {key} out")
        if self.values_too and not schema.fits(node, kind):
            close = near(node, names_of(kind), otherwise="") if isinstance(node, str) else ""
            if isinstance(node, str) and any(get_origin(k) in (list, Sequence) for k in schema.members(kind)):
                close = f"; a list of one is [{node}]"
            raise self.error(key, f"expected {words(kind)}, got {show(node)}{close}")

    def part(
        self,
        node: dict[str, Any],
        kinds: tuple[schema.Kind, ...],
        bases: tuple[type, ...],
        *,
        key: str,
        default: object,
    ) -> dict[str, Any]:
        """Check and complete a part, in long form or, where the class is clear, by its arguments alone."""
        spec = default if isinstance(default, dict) and "class_path" in default else {}
        before = schema.find_class(spec["class_path"], bases) if spec else None
        long = "class_path" in node
        self._refuse_several_classes(node, key)
        cls = self._class_of(node, bases, key) if long else before or self._only_class(bases, key)
        given = node.get("init_args", {}) if long or node.keys() == {"init_args"} else node
        if not isinstance(given, dict):
            raise self.error(key, f"expected a mapping of options, got {show(given)}")
        same = cls is before
        skip = _filled(cls, kinds)
        try:
            schema.slots(cls, skip)
        except TypeError as error:
            raise self.error(key, " ".join(str(error).split())) from None
        complete = self.arguments(given, cls, key=key, default=spec.get("init_args", {}) if same else {}, skip=skip)
        if (spec and not same) or not (spec or given):  # an optional part of `{}` is none to jsonargparse
            complete = schema.own_defaults(cls, skip) | complete
        return {"class_path": node["class_path"], "init_args": complete} if long else complete

    def _refuse_several_classes(self, node: dict[str, Any], key: str) -> None:
        """Raises `ConfigError` for a short form with more than its one key."""
        named = [name for name in node if CLASS.fullmatch(name)]
        if named and len(node) > 1:
            others = ", ".join(name for name in node if name != named[0])
            raise self.error(
                key, f"{others}: unexpected beside {named[0]}; write one class, with its options below its name"
            )

    def _class_of(self, node: dict[str, Any], bases: tuple[type, ...], key: str) -> type:
        for name in node:
            if name not in LONG_FORM:
                raise self.error(join(key, name), "unknown key beside class_path; arguments stand below init_args")
        try:
            return schema.find_class(node["class_path"], bases)
        except NoPartError as error:
            raise self.error(join(key, "class_path"), str(error)) from None

    def _only_class(self, bases: tuple[type, ...], key: str) -> type:
        concrete = [base for base in bases if not inspect.isabstract(base)]
        if not concrete:
            names = ", ".join(sorted(cls.__name__ for cls in schema.choices(bases)))
            raise self.error(key, f"names no class; write {{CLASS: {{OPTION: VALUE}}}} with one of {names}")
        return concrete[0]


def _is_default(node: Node, default: object) -> bool:
    """Whether a text is the default function or class as `--print_config` writes it."""
    named = isinstance(default, str | type) or inspect.isroutine(default)
    return named and isinstance(node, str) and node == plain(default)


def _names_code(node: Node, kind: schema.Kind) -> bool:
    """Whether a value is or holds a text or a mapping that might name something to import. A text without a dot does
    not where the type takes texts."""
    if isinstance(node, list):
        return any(_names_code(item, kind) for item in node)
    return isinstance(node, dict) or isinstance(node, str) and ("." in node or str not in schema.members(kind))


def _filled(cls: type, kinds: tuple[schema.Kind, ...]) -> frozenset[str]:
    """The first parameters of a class, which the caller of a `Callable[[...], cls]` slot gives."""
    for kind in kinds:
        factory = schema.factory_of(kind)
        if factory and issubclass(cls, schema.base_classes(factory[0])):
            return frozenset(list(inspect.signature(cls).parameters)[: factory[1]])
    return frozenset()
