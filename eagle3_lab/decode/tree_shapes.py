"""Shapes of token trees that a draft grows: static ones, published lists of sibling ranks, and the confidence-driven
one.

How they are driven is in :mod:`eagle3_lab.decode.tree_growth`. Scores are the draft's log-softmax at temperature 1.
Sizes have bounds far above what any method gains from (published trees have 4 to 64 nodes, 12 levels at most): a slip
in a YAML must cost one line, not memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.decode.tree_growth import Choose, Drawable, Frontier, Grow, Grown, Growth, top
from eagle3_lab.decode.verify import Chance

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


# ------------------------------------------------------------------------------------------------------ static trees


_Path = tuple[int, ...]


@dataclass(frozen=True)
class _Level:
    """One level of a static tree, on one device: ``pick`` the place of each node among (frontier row, rank), of each
    next frontier row its place in the level, its parent's frontier row, and what it sees."""

    ranks: int
    pick: Int[Tensor, " nodes"]
    front: Int[Tensor, " F"]
    parent: Int[Tensor, " F"]
    visible: Bool[Tensor, "F M"]


@dataclass(frozen=True)
class _Plan:
    """A static tree on one device: its levels, every node's parent, and the nodes that have children."""

    levels: list[_Level]
    parents: Int[Tensor, " N"]
    inner: Int[Tensor, " I"]


class StaticTree(Drawable):
    """A fixed shape: each choice is a path of sibling ranks below the root, ``[0, 2]`` being the third best child of
    the best child (where children are drawn, the third drawn of the first). Nodes are ordered by level, then by path.

    Raises ValueError for no choices, an empty path, a negative rank, a repeated path, a path whose parent does not
    stand before it, more than `MOST_NODES` nodes or `MOST_LEVELS` levels.
    """

    # A YAML's list is read as tuples, the first of the two: in a list of lists each is checked beside a copy of all.
    def __init__(self, choices: tuple[tuple[int, ...], ...] | list[list[int]]) -> None:
        if not choices:
            raise ValueError("choices must name at least one node, got []")
        if len(choices) >= MOST_NODES:
            raise ValueError(f"choices must be at most {MOST_NODES - 1} nodes below the root, got {len(choices)}")
        if (levels := max(map(len, choices))) > MOST_LEVELS:
            raise ValueError(f"choices must be at most {MOST_LEVELS} levels deep, got {levels}")
        paths = [tuple(c) for c in choices]
        seen: set[tuple[int, ...]] = {()}
        for i, path in enumerate(paths):
            if not path or min(path) < 0:
                raise ValueError(f"choices.{i} must be a path of ranks >= 0, got {list(path)}")
            if path in seen:
                raise ValueError(f"choices.{i} repeats {list(path)}")
            if path[:-1] not in seen:
                raise ValueError(f"choices.{i}: the parent {list(path[:-1])} of {list(path)} must stand before it")
            seen.add(path)
        order = sorted(seen, key=lambda path: (len(path), path))
        number = {path: i for i, path in enumerate(order)}
        self._parents = [number[path[:-1]] for path in order]
        self._by_level = [list(level) for _, level in groupby(order, len)]
        inner = {path[:-1] for path in paths}
        self._frontiers = [[p for p in level if p in inner] for level in self._by_level]
        self._inner = [number[path] for front in self._frontiers for path in front]
        self._seen = _ancestors(self._frontiers)
        self._plans: dict[torch.device, _Plan] = {}
        self.nodes = len(order)
        self.levels = len(self._by_level) - 1
        self.widths = tuple(len(front) for front in self._frontiers[1:-1])
        self.ranks = tuple(max(path[-1] for path in level) + 1 for level in self._by_level[1:])

    def check(self, vocab: int) -> None:
        if vocab < max(self.ranks):
            raise ValueError(f"choices use {max(self.ranks)} ranks, the draft vocabulary has {vocab} tokens")

    def choosing(self, choose: Choose) -> Growth:
        return _StaticGrowth(self, choose)

    def require_drawable(self) -> Drawable:
        known = {path for level in self._by_level for path in level}
        for path in (path for level in self._by_level[1:] for path in level if path[-1]):
            elder = (*path[:-1], path[-1] - 1)
            if elder not in known:
                raise ValueError(
                    f"choices: {list(path)} stands without its sibling {list(elder)}; drawn siblings must all be judged"
                )
        return self

    def inner(self, device: torch.device) -> Int[Tensor, " I"]:
        return self.plan(device).inner

    def plan(self, device: torch.device) -> _Plan:
        """The index tensors, made once per device."""
        if device not in self._plans:
            levels = [self._level(n, device) for n in range(1, self.levels + 1)]
            parents, inner = (torch.tensor(nodes, device=device) for nodes in (self._parents, self._inner))
            self._plans[device] = _Plan(levels, parents, inner)
        return self._plans[device]

    def _level(self, n: int, device: torch.device) -> _Level:
        level, front, ranks = self._by_level[n], self._frontiers[n], self.ranks[n - 1]
        before, place = ({path: i for i, path in enumerate(some)} for some in (self._frontiers[n - 1], level))
        visible = torch.zeros(len(front), sum(map(len, self._frontiers[1 : n + 1])), dtype=torch.bool)
        for row, path in enumerate(front):
            visible[row, self._seen[path]] = True

        def index(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return _Level(
            ranks,
            index([before[path[:-1]] * ranks + path[-1] for path in level]),
            index([place[path] for path in front]),
            index([before[path[:-1]] for path in front]),
            visible.to(device),
        )


def _ancestors(frontiers: list[list[_Path]]) -> dict[_Path, list[int]]:
    """Of every frontier row the rows it sees, itself the last; rows are counted from level 1 on."""
    seen: dict[_Path, list[int]] = {(): []}
    for row, path in enumerate(path for front in frontiers[1:] for path in front):
        seen[path] = [*seen[path[:-1]], row]
    return seen


class Chain(StaticTree):
    """``length`` drafts, each the best child of the last. Raises ValueError for a length outside 1 .. `MOST_LEVELS`."""

    def __init__(self, length: int) -> None:
        require_size("length", length, MOST_LEVELS)
        super().__init__([[0] * n for n in range(1, length + 1)])


# One string a level, one word a node, one digit a rank.
# Source: SafeAILab/EAGLE cb7e084 eagle/model/choices.py:1-3 (25 nodes; Medusa's list of this name has 63).
MC_SIM_7B_63: list[list[int]] = [
    [int(rank) for rank in path]
    for level in (
        "0 1 2 3",
        "00 01 02 10 11 20 21 30",
        "000 001 002 010 011 020 021 100",
        "0000 0001 0002",
        "00000 00001",
    )
    for path in level.split()
]


class McSim7b63(StaticTree):
    """The published static tree of EAGLE-1, ``mc_sim_7b_63``: 26 nodes with the root, 5 levels."""

    def __init__(self) -> None:
        super().__init__(MC_SIM_7B_63)


class _StaticGrowth(Growth):
    def __init__(self, shape: StaticTree, choose: Choose) -> None:
        self.shape, self.choose = shape, choose
        self.tokens: list[Tensor] = []

    def expand(self, log_q: Float[Tensor, "B F Vd"]) -> Frontier | None:
        level = self.shape.plan(log_q.device).levels[len(self.tokens)]
        tokens = self.choose(log_q, level.ranks).flatten(1)[:, level.pick]
        self.tokens.append(tokens)
        if len(self.tokens) == self.shape.levels:
            return None
        batch = len(tokens)
        return Frontier(tokens[:, level.front], level.parent.expand(batch, -1), level.visible.expand(batch, -1, -1))

    def finish(self) -> Grown:
        tokens = torch.cat(self.tokens, dim=1)
        parents = self.shape.plan(tokens.device).parents
        return Grown(tokens, parents.expand(len(tokens), -1))


# ------------------------------------------------------------------------------------------------------ dynamic tree


class DynamicTree(Grow):
    """The confidence-driven tree of EAGLE-2 and EAGLE-3: each level keeps the ``width`` nodes of highest cumulated
    log-probability as next frontier, then the ``budget - 1`` best of all candidates form the tree.

    ``levels`` below the root (official depth + 1), ``width`` (official top_k), ``budget`` nodes with the root (official
    total_token). A node never stands without its parent: a child's score is at most its parent's, and ties go to the
    lower level, then to the lower index.

    Raises ValueError for values < 1 (budget < 2), a budget above the number of candidates plus the root, and sizes
    above those of :mod:`eagle3_lab.decode.tree_shapes`.
    Source: SafeAILab/EAGLE cb7e084 eagle/model/cnets.py:669-823.
    """

    def __init__(self, levels: int, width: int, budget: int) -> None:
        require_size("levels", levels, MOST_LEVELS)
        require_size("width", width, MOST_NODES)
        most = 1 + width + (levels - 1) * width**2
        if most > MOST_CANDIDATES:
            raise ValueError(
                f"width must leave at most {MOST_CANDIDATES} candidates, got {width}: {most} with levels {levels}"
            )
        most = min(most, MOST_NODES)
        if not 2 <= budget <= most:
            raise ValueError(f"budget must lie in 2 .. {most} with levels {levels} and width {width}, got {budget}")
        self.levels, self.width, self.budget = levels, width, budget
        self.nodes = budget
        self.widths = (width,) * (levels - 1)

    def check(self, vocab: int) -> None:
        if vocab < self.width:
            raise ValueError(f"width is {self.width}, the draft vocabulary has {vocab} tokens")

    def begin(self, chance: Chance | None = None) -> Growth:
        return _DynamicGrowth(self.levels, self.width, self.budget)


class _DynamicGrowth(Growth):
    """Candidates are numbered from 1 in order of level, frontier row and rank; 0 is the root."""

    def __init__(self, levels: int, width: int, budget: int) -> None:
        self.levels, self.width, self.budget = levels, width, budget
        self.tokens: list[Tensor] = []  # each (B, F * width), as are scores and parents
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []
        self.front: tuple[Tensor, Tensor] | None = None  # the frontier's candidate numbers and scores, (B, F)
        self.visible: Tensor | None = None

    def expand(self, log_q: Float[Tensor, "B F Vd"]) -> Frontier | None:
        exact = log_q if log_q.dtype == torch.float64 else log_q.float()
        log_p, tokens = top(exact, self.width)  # (B, F, width)
        number, score = self.front or (log_q.new_zeros(log_q.shape[:2], dtype=torch.long), log_p.new_zeros(1, 1))
        tokens, scores = tokens.flatten(1), (score[..., None] + log_p).flatten(1)
        behind = 1 + sum(t.shape[1] for t in self.tokens)
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.parents.append(number.repeat_interleave(self.width, dim=1))
        if len(self.tokens) == self.levels:
            return None
        best, pick = top(scores, self.width)
        self.front = (behind + pick, best)
        parent = pick // self.width
        self.visible = self._see(parent)
        return Frontier(tokens.gather(1, pick), parent, self.visible)

    def finish(self) -> Grown:
        scores, tokens = torch.cat(self.scores, dim=1), torch.cat(self.tokens, dim=1)
        above = torch.cat(self.parents, dim=1)
        chosen = top(scores, self.budget - 1)[1].sort(dim=1).values  # by number, so parents come first
        kept = torch.zeros_like(above).scatter_(1, chosen, 1)
        node = torch.nn.functional.pad(kept.cumsum(1), (1, 0))  # candidate number -> node, where kept; the root is 0
        parents = node.gather(1, above.gather(1, chosen))
        return Grown(tokens.gather(1, chosen), torch.nn.functional.pad(parents, (1, 0)), scores.gather(1, chosen))

    def _see(self, parent: Int[Tensor, "B F"]) -> Bool[Tensor, "B F M"]:
        """What the parent saw, and itself."""
        batch, rows = parent.shape
        itself = torch.eye(rows, dtype=torch.bool, device=parent.device).expand(batch, rows, rows)
        if self.visible is None:
            return itself
        seen = self.visible.gather(1, parent[:, :, None].expand(-1, -1, self.visible.shape[2]))
        return torch.cat((seen, itself), dim=2)


class Medusa63(StaticTree):
    """Medusa's static tree, ``mc_sim_7b_63`` of its own repository: 64 nodes with the root, 4 levels. (EAGLE-1's tree
    of that name is another one.) Hydra decodes with it too.

    Source: FasterDecoding/Medusa 11af0aa medusa/model/medusa_choices.py.
    """

    def __init__(self) -> None:
        super().__init__([[int(rank) for rank in path] for level in LEVELS for path in level.split()])


LEVELS = (
    "0 1 2 3 4 5 6 7 8 9",
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90",
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200",
    "0000 0001",
)
