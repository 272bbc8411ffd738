"""From a checked configuration to objects: seed, then build every part, innermost first.

Seeding comes before, because parts draw their weights when they are built. What a part's constructor refuses with a
`ValueError` is the user's mistake and becomes one line with the part's key.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from eagle3_lab.config import schema
from eagle3_lab.config.checking import CONFIG_FIELD, Config, T, check, not_in_yaml
from eagle3_lab.config.composing import compose, parse_overrides
from eagle3_lab.config.editing import COMMAND_LINE
from eagle3_lab.config.reading import Node, join, label, locate, plain_key, show
from eagle3_lab.errors import ConfigError


def load(path: Path | str, *overrides: str, into: type[T]) -> T:
    """Read, check and build an instance of `into`: `load("experiments/eagle3.yaml", "seed=3", into=Experiment)`.

    The parameters of `into` are the top-level keys. If there is a parameter `seed`, torch, NumPy and Python are seeded
    with it first.

    Raises: `ConfigError`, one line.
    """
    return build(check(compose(path, parse_overrides(overrides)), into))


def build(config: Config[T]) -> T:
    """Seed and build the object that a configuration describes, an instance of `config.into`.

    Raises: `ConfigError` for what a constructor refuses with `ValueError`, with the key of the part.
    """
    seed = vars(config.parsed).get("seed")
    if isinstance(seed, int):
        seed_everything(seed)
    failures: list[Exception] = []
    make = _maker(config, failures)
    parser = schema.parser_for(config.into, not_in_yaml(config.into))
    parts: dict[str, Any] = {}
    try:
        parts = vars(parser.instantiate(config.parsed, instantiators=[(make, object, True)]))
    except Exception:
        if not failures:
            raise
    # for a slot `Part | X` jsonargparse tries X when the part cannot be built, and then tells of X, or even takes it
    if failures:
        raise failures[0]
    if not_in_yaml(config.into):
        parts = {**parts, CONFIG_FIELD: config}
    return cast(T, make(config.into, **parts))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, which constructors draw from."""
    import numpy as np
    import torch

    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed: {seed}; a number within 0 .. 2**63 - 1 is needed")
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the range that NumPy takes
    torch.manual_seed(seed)


def _maker(config: Config, failures: list[Exception]) -> Callable[..., Any]:
    """Return what jsonargparse calls in place of each class; what a constructor raises is also put into `failures`."""

    def make(cls: type, *args: object, **arguments: object) -> Any:  # noqa: ANN401 - of whatever class
        try:
            return cls(*args, **arguments)
        except ValueError as error:
            failures.append(_refusal(config, error, cls, arguments))
            raise failures[-1] from error
        except Exception as error:
            failures.append(error)
            raise

    return make


def _refusal(config: Config, error: ValueError, cls: type, arguments: dict[str, object]) -> ConfigError:
    text = " ".join(str(error).split())
    key = _key_of(config, cls, arguments)
    where, name = config.composed.where, _argument(text, arguments)
    place = locate(where, join(key, name) if name else key, otherwise=label(config.composed.path))
    if not place.startswith((COMMAND_LINE, "--")):
        # what the file says fitted, until the command line changed what it must fit with
        told = set(re.findall(r"\w+", text)) & arguments.keys()
        given = (name for name in sorted(told) if where.get(join(key, name)) == COMMAND_LINE)
        place = next((f"--{join(key, name)} {show(arguments[name])}: " for name in given), place)
    return ConfigError(f"{place}{key or cls.__name__}: {text}")


def _argument(text: str, arguments: dict[str, object]) -> str:
    """The argument that a message begins with, as in "depth must be >= 1", "optimizer.lr must be > 0" or "choices.3
    repeats"; "" if it begins otherwise."""
    names = text.partition(" ")[0].rstrip(":").split(".")
    return next((".".join(names[i:]) for i, name in enumerate(names) if name in arguments), "")


def _key_of(config: Config, cls: type, arguments: dict[str, object]) -> str:
    """Find the part that was being built: the first of this class with the same scalars; "" if there is none.

    jsonargparse does not say for which key it builds. Of two equal parts the first fails first.
    """
    scalars = {k: v for k, v in arguments.items() if v is None or isinstance(v, bool | int | float | str)}
    for key, node in _parts(config.plain, ""):
        name = str(node["class_path"]).rpartition(".")[2]
        given = node.get("init_args") or {}
        if name == cls.__name__ and all(k in given and given[k] == v for k, v in scalars.items()):
            return plain_key(key)
    return ""


def _parts(node: Node, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "class_path" in node:
            yield key, node
        for name, value in node.items():
            yield from _parts(value, join(key, name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _parts(value, join(key, index))
