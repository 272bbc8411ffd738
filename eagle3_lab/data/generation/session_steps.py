"""What the target does for rows that it answers side by side: a forward over them, or only the room one would take.

Inference mode is entered in here: on a generator it would last while its consumer runs, or not at all where a type
checker has wrapped the generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.interfaces import Target, TargetSession
from eagle3_lab.types import Needs, Tree


@torch.inference_mode()
def prefill(
    target: Target, session: TargetSession, rows: Sequence[int], prompts: Sequence[Sequence[int]]
) -> Float[Tensor, "n V"]:
    """Read n prompts in one forward and put their keys into ``rows``; the logits after each."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    beside = target.open(len(prompts), ids.shape[1], Needs(logits=True))
    logits = beside.prefill(ids.to(target.device), lengths.to(target.device)).logits[:, 0]
    for i, row in enumerate(rows):
        session.cache.adopt(row, beside.cache, i)
    return logits


@torch.inference_mode()
def step(session: TargetSession, token: Int[Tensor, " B"], active: Bool[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """One forward of one token a row; idle rows are scored and dropped."""
    zero = torch.zeros_like(token)
    token = token.clamp(min=0)  # where an idle row's logits are NaN
    tree = Tree(token[:, None], zero[:, None], torch.ones_like(token, dtype=torch.bool)[:, None])
    logits = session.score(tree).logits[:, 0]
    session.cache.advance(active.long(), bound=1)  # a single node lies where it belongs: nothing to move
    return logits


@torch.inference_mode()
def hold(session: TargetSession, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
    """Leave the room in ``rows`` that :func:`prefill` would fill."""
    lengths = [len(prompt) for prompt in prompts]
    session.cache.lengths[list(rows)] = torch.tensor(lengths, device=session.cache.lengths.device)
    session.cache.bound = max(session.cache.bound, *lengths)


@torch.inference_mode()
def skip(session: TargetSession, active: Bool[Tensor, " B"]) -> None:
    """Leave the room that :func:`step` would fill."""
    session.cache.view(1)  # looks at the longest row where a step would
    session.cache.advance(active.long(), bound=1)


@torch.inference_mode()
def settle(session: TargetSession, active: Bool[Tensor, " B"]) -> None:
    """Empty the idle rows, so that they hold the view open no longer, and look at the longest row."""
    session.cache.lengths[~active] = 0
    session.cache.settle()
