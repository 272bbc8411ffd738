"""Token trees as values: the root alone, a chain, a tree cut at a depth, repeated candidates merged.

Every function but :func:`narrow` keeps N, so shapes stay fixed on the device; what is removed becomes padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.types import PADDING, Tree


def root_only(root: Int[Tensor, " B"], nodes: int) -> Tree:
    """The root, and ``nodes - 1`` places of padding behind it."""
    tokens = torch.zeros(root.shape[0], nodes, dtype=torch.long, device=root.device)
    tokens[:, 0] = root
    parents = torch.full_like(tokens, PADDING)
    parents[:, 0] = 0
    return Tree(tokens, parents, parents != PADDING)


def chain(tokens: Int[Tensor, "B N"], drafts: Int[Tensor, " B"]) -> Tree:
    """The first token as root and ``drafts[b]`` of the others below it, each under the one before; the rest becomes
    padding.

    tokens 9 5 6 7, drafts 2:    9 - 5 - 6, and one place of padding
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    real = index <= drafts[:, None]
    parents = torch.where(real, (index - 1).clamp(min=0), PADDING)
    return Tree(tokens.masked_fill(~real, 0), parents, real)


def cut(tree: Tree, depth: Int[Tensor, " B"]) -> Tree:
    """Turn every node more than ``depth[b]`` levels below the root into padding; the root always stays."""
    gone = tree.depth() > depth.clamp(min=0)[:, None]
    return replace(tree, parents=tree.parents.masked_fill(gone, PADDING), candidate=tree.candidate & ~gone)


def extent(tree: Tree) -> int:
    """Places up to the last node of any row, the root's own at least: what must be scored. Where the host would have to
    wait for the device to know, all N: there shapes are kept fixed, and rows are nearly free."""
    if tree.tokens.device.type != "cpu":
        return tree.tokens.shape[1]
    used = (tree.parents != PADDING).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1


def narrow(tree: Tree, places: int) -> Tree:
    """The first ``places`` places, behind which there must be padding alone."""
    q = None if tree.q is None else tree.q[:, :places]
    first = slice(places)
    return Tree(
        tree.tokens[:, first], tree.parents[:, first], tree.candidate[:, first], q, replacement=tree.replacement
    )


def merge(tree: Tree) -> Tree:
    """Merge fixed candidates that spell the same path, so that none is scored twice.

    The lowest index of equals stays and takes over the others' children; the others become padding. Nodes that are not
    candidates are never merged: their proposer wants each one's row.

        root - 1:a - 2:b          root - 1:a - 2:b
             - 3:a - 4:b     ->              - 5:c        3 and 4 padding
                   - 5:c

    Raises ValueError where the candidates were drawn (``q`` given): there every draw must be judged.
    """
    if tree.q is not None:
        raise ValueError("merge takes fixed candidates only: of drawn ones every draw must be judged, repeats too")
    nodes = tree.tokens.shape[1]
    real = tree.parents != PADDING
    index = torch.arange(nodes, device=tree.tokens.device)
    depth = tree.depth()
    both = (tree.candidate & real)[:, :, None] & (tree.candidate & real)[:, None, :]
    alike = both & (tree.tokens[:, :, None] == tree.tokens[:, None, :]) & (depth[:, :, None] == depth[:, None, :])
    alike = alike | (index[:, None] == index)
    above = tree.parents.clamp(min=0)
    for _ in range(max(nodes - 1, 1).bit_length()):  # equal over the last 1, 2, 4, ... tokens of both paths
        rows = alike.gather(1, above[:, :, None].expand(-1, -1, nodes))
        alike = alike & rows.gather(2, above[:, None, :].expand(-1, nodes, -1))
        above = above.gather(1, above)
    first = alike.int().argmax(-1)  # argmax returns the first of several maxima: the lowest index
    stays = (first == index) & real
    parents = first.gather(1, tree.parents.clamp(min=0)).masked_fill(~stays, PADDING)
    return replace(tree, parents=parents, candidate=tree.candidate & stays)
