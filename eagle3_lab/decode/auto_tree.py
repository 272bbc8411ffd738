"""The dynamic tree that is fastest on a machine: from what rounds of a wide tree accepted, and from what sizes cost.

A round with a wide tree shows what narrower ones would have held. The tree of (levels, width, budget) keeps, of the
wide tree's nodes, those no deeper than ``levels`` that the first ``width`` children of the ``width`` best nodes of each
level lead to, and of these the budget - 1 of highest score. Every node kept that was accepted is one token more, so

    tau(levels, width, budget) = 1 + mean number of its nodes that were accepted
    tokens/s                  ~ tau / (c_verify(budget) + c_host + c_draft(1) + (levels - 1) c_draft(width))

Nodes that the wide tree did not keep have lower scores than all it kept; they count as refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.watched import Watched
from eagle3_lab.decode.tree_shapes import DynamicTree
from eagle3_lab.types import TargetOut, Tree, Verdict


@dataclass(frozen=True)
class SeenRound:
    """One round of one row: parents and scores of nodes 1 .. N-1, and which were accepted."""

    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accepted: frozenset[int]


@dataclass(frozen=True)
class Choice:
    """A shape, the tau that the rounds seen give it, and the tokens/s it promises."""

    levels: int
    width: int
    budget: int
    tau: float
    tokens_per_s: float


class Watching(Watched):
    """An :class:`Eagle` that keeps every round it proposed and what became of it. For calibration: it reads the device
    in every round."""

    def __init__(self, eagle: Eagle) -> None:
        super().__init__(eagle)
        self._eagle = eagle
        self.rounds: list[SeenRound] = []

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        grown = self._eagle.grown
        assert grown is not None and grown.scores is not None, "only a dynamic tree has scores"
        rows = zip(grown.parents.tolist(), grown.scores.tolist(), verdict.path.tolist(), strict=True)
        for parents, scores, path in rows:
            self.rounds.append(SeenRound(tuple(parents[1:]), tuple(scores), frozenset(n for n in path if n > 0)))
        super().observe(tree, verdict, out)


def accepted_by_budget(seen: SeenRound, levels: int, width: int) -> list[int]:
    """How many accepted nodes the tree of ``levels`` and ``width`` holds with a budget of 2, 3, ... nodes, the root
    counted, as far as the wide tree knows."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(seen.parents, start=1):
        children.setdefault(parent, []).append(node)  # by rank: a tree's siblings stand in order of their scores
    frontier, held = [0], []
    for _ in range(levels):
        level = [child for node in frontier for child in children.get(node, [])[:width]]
        held += level
        frontier = sorted(level, key=lambda node: (-seen.scores[node - 1], node))[:width]
    ordered = sorted(held, key=lambda node: (-seen.scores[node - 1], node))
    counts, total = [], 0
    for node in ordered:
        total += node in seen.accepted
        counts.append(total)
    return counts


def choose_tree(
    rounds: Sequence[SeenRound],
    verify: Callable[[float], float],
    draft: Callable[[float], float],
    *,
    levels: int,
    width: int,
    budgets: Sequence[int],
) -> list[Choice]:
    """Every shape up to the wide tree's ``levels`` and ``width``, the fastest first; equals by fewer levels, width and
    nodes. ``verify(n)`` seconds of a cycle but for drafting with n nodes, ``draft(w)`` of a level of w rows.

    Raises ValueError where no round was seen.
    """
    if not rounds:
        raise ValueError("no round was seen: answers of two tokens at least are needed")
    found = []
    for deep in range(1, levels + 1):
        for wide in range(1, width + 1):
            counts = [accepted_by_budget(seen, deep, wide) for seen in rounds]
            most = 1 + wide + (deep - 1) * wide**2
            for budget in (b for b in budgets if 2 <= b <= most):
                held = [c[min(budget - 1, len(c)) - 1] if c else 0 for c in counts]
                tau = 1 + sum(held) / len(held)
                cycle = verify(budget) + draft(1) + (deep - 1) * draft(wide)
                found.append(Choice(deep, wide, budget, tau, tau / cycle))
    return sorted(found, key=lambda c: (-c.tokens_per_s, c.levels, c.width, c.budget))


class AutoTree(DynamicTree):
    """The dynamic tree that `bench decode --json` found fastest on this machine for this head and target.

    Args:
        measured: the JSON it wrote.

    Raises:
        ValueError: no such file, or one without a tree.
    """

    def __init__(self, measured: Path) -> None:
        try:
            said = json.loads(Path(measured).read_text())["trees"][0]
            shape = int(said["levels"]), int(said["width"]), int(said["budget"])
        except (OSError, ValueError, LookupError, TypeError):
            raise ValueError(
                f"measured: {measured} is no JSON of `bench decode` with a tree; run it on this experiment, with --json"
            ) from None
        super().__init__(*shape)
