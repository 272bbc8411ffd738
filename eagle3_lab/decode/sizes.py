"""How large trees may be. Sizes are numbers in a YAML, and a slip of the finger there must cost one line, not memory.

The bounds are far above what any method gains from (published trees have 4 to 64 nodes, 12 levels at most). At them a
round still fits a workstation: what sees what is [N, N], the target's logits are [N, vocabulary].
"""

from __future__ import annotations

MOST_NODES = 4096
"""Nodes of a tree, the root included."""

MOST_LEVELS = 1024
"""Levels below the root."""

MOST_CANDIDATES = 2**20
"""Nodes that a dynamic tree chooses its own among."""

MOST_COLUMNS = 512
"""Columns of Lookahead's window, and n-grams tried a round: every round compares a window with all the pool holds."""


def require_size(name: str, value: int, most: int, least: int = 1) -> None:
    """Raises ValueError for an argument ``name`` that is not within ``least`` .. ``most``."""
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
