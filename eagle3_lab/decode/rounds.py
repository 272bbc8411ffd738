"""What a round's verdict comes to once the answer's end is respected: counted, cut, frozen, all on the device.

Numbers, defined once: a draft is judged only if its position lies in the emitted text; an accepted end token ends the
round without bonus; a row that has ended emits nothing and keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_lab.types import PADDING, Tree, Verdict


@dataclass(frozen=True)
class Block:
    """One round of B rows: ``tokens[b, :emitted[b]]`` are new text, ``ended`` where the last of them is an end token;
    ``judged``, ``accepted`` and ``overrun`` drafts as in :class:`eagle3_lab.types.Round`. ``verdict`` is what to
    commit: its path and length leave the last emitted token as ``bonus``, the next root, whether it was a bonus or a
    draft. Where nothing was emitted its path is all PADDING, its length -1, its bonus the old root."""

    tokens: Int[Tensor, "B A"]
    emitted: Int[Tensor, " B"]
    judged: Int[Tensor, " B"]
    accepted: Int[Tensor, " B"]
    overrun: Int[Tensor, " B"]
    ended: Bool[Tensor, " B"]
    verdict: Verdict


def block(tree: Tree, verdict: Verdict, ends: Int[Tensor, " E"], remaining: Int[Tensor, " B"]) -> Block:
    """Cut a verdict at the first end token and at ``remaining`` tokens (0: the row has ended).

    path 0 2 5, length 2, bonus x; tokens of 2 and 5: a b; b an end token
    -> tokens a b, emitted 2, accepted 2, judged 2; commit path 0 2, length 1, bonus b
    """
    slot = torch.arange(verdict.path.shape[1], device=tree.tokens.device)
    length = verdict.length[:, None]
    drafts = tree.tokens.gather(1, verdict.path.roll(-1, 1).clamp(min=0))  # what follows path entry k
    tokens = torch.where(slot == length, verdict.bonus[:, None], drafts)
    emitted = torch.minimum(verdict.length + 1, remaining)
    is_end = (tokens[..., None] == ends).any(-1) & (slot < emitted[:, None])  # isin may wait for the device
    ended = is_end.any(1)
    emitted = torch.where(ended, is_end.int().argmax(1) + 1, emitted)  # argmax: the first of them

    last = verdict.path.gather(1, length)
    child = tree.candidate & (tree.parents == last)
    child[:, 0] = False  # the root is nobody's child, though its parent is 0
    refused = child.any(1) & (emitted > verdict.length)  # the failed draft's place is the bonus's

    accepted = torch.minimum(verdict.length, emitted)
    overrun = torch.where(remaining > 0, verdict.length - accepted, 0)
    bonus = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
    kept = Verdict(
        verdict.path.masked_fill(slot >= emitted[:, None], PADDING),
        emitted - 1,
        torch.where(emitted > 0, bonus, tree.tokens[:, 0]),
    )
    return Block(tokens, emitted, accepted + refused, accepted, overrun, ended, kept)
