"""A cell's key: the options that decide its result, by the table of `config.key_options`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from eagle3_lab.config import Config
from eagle3_lab.config.key_options import OPTIONS
from eagle3_lab.config.keys import Content, digest, reduced, without_defaults
from eagle3_lab.data.records import file_hash, locate
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment, training_keys
from eagle3_lab.target_model.loading import model_hash
from eagle3_lab.tracking.params import flatten

VERSION = 2
"""Part of every key; raise it when a default changes its meaning, since keys hold no defaults."""

KEYS = ("answers", "documents", "cell")
"""Keys of `key_options` that decide a cell's result, beside those of its training."""


def cell_options(config: Config[Experiment]) -> dict[str, str]:
    """Return the options that decide a cell's result and have not their defaults, as MLflow's parameters are written:
    ``{"model.draft": "Eagle3", "model.unroll.depth": "3"}``. An option that names a file counts by the file's content.
    """
    tree = without_defaults(config)
    keys = (*training_keys(tree["init_args"]), *KEYS)
    return flatten(reduced(tree, keys, CONTENTS)["init_args"])


def cell_key(options: Mapping[str, str]) -> str:
    """Return the hash of `cell_options`, 16 hexadecimal digits."""
    return digest(VERSION, dict(options))


def first_difference(options: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return in words what differs first between two results of :func:`cell_options`; "" where nothing does."""
    for key in sorted(options.keys() | others.keys()):
        if options.get(key) != others.get(key):
            return f"{key} {others.get(key, 'left out')} there, {options.get(key, 'left out')} here"
    return ""


def _content(value: object) -> object:
    """Return the hash of the file that a text names; any other value as it is, such as a file that is not there yet,
    which the run that reads it reports."""
    try:
        stat = locate(str(value)).stat()
    except UserError:
        return value
    return f"sha256 {_file_hash(str(value), stat.st_mtime_ns, stat.st_size)}"


@functools.cache
def _file_hash(path: str, changed: int, size: int) -> str:
    return file_hash(path)


@functools.cache
def _model(name: str) -> str:
    """Return the hash of a local model's files, and any other name as it is."""
    try:
        return model_hash(name)
    except UserError:
        return name


CONTENTS: dict[str, Content] = {
    f"{cls}.{option}": _content for cls, options in OPTIONS.items() for option in options if options[option].contents
} | {"TargetChoice.model": _model}
"""What each option leads to that counts by content."""
