"""A configuration as flat parameters: what the run list shows, compares and filters by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


def flatten(tree: Mapping[str, object]) -> dict[str, str]:
    """A nested configuration as flat text, under the keys by which the command line overrides it.

    A part's class stands under the part's own key, without this package's path, and ``init_args`` drops out:

        {"model": {"draft": {"class_path": "eagle3_lab.draft.Eagle", "init_args": {"depth": 7}}, "losses": [0.5]}}
        gives  model.draft: Eagle    model.draft.depth: 7    model.losses.0: 0.5
    """
    return dict(_flat("", tree))


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    inside: Mapping[str, object] | None = None
    if isinstance(value, Mapping):
        inside = value
    elif isinstance(value, (list, tuple)):
        inside = {str(i): item for i, item in enumerate(value)}
    if inside is None or not inside:
        yield key, _text(value)
        return
    for name, item in inside.items():
        if name == "class_path" and key:
            yield key, re.sub(r"^eagle3_lab\.(\w+\.)*", "", str(item))
        elif name == "init_args":
            yield from _flat(key, item) if item else ()
        else:
            yield from _flat(f"{key}.{name}" if key else str(name), item)


def _text(value: object) -> str:
    """As YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
