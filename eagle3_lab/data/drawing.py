"""The next token of every row, drawn from its generator: temperature, top-p, and sums that stay right for large
vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle3_lab.types import PADDING

BLOCK = 256  # tokens whose probabilities are summed together where one of them is drawn
LIKELIEST, MORE = 256, 16  # tokens that top-p looks at first, and how many times as many where they are too few


def draw(
    logits: Float[Tensor, "B V"],
    temperature: float,
    generators: Sequence[torch.Generator | None],
    top_p: float | None = None,
) -> Int[Tensor, " B"]:
    """One token a row, never one of probability 0; PADDING where the logits are NaN.

    Args:
        logits: at float32 or what they are, if that is more, their softmax is taken.
        temperature: 0 takes the likeliest, the first of equals; otherwise logits are divided by it.
        generators: of the rows' draws, on the CPU; None where a row's token does not matter.
        top_p: tokens are drawn from the likeliest ones that together have this probability; None: from all.
    """
    if temperature == 0:
        best, index = logits.max(-1)  # which is NaN where any is
        return index.masked_fill(best.isnan(), PADDING)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probs = torch.softmax(wide / temperature, -1)
    if top_p is not None and top_p < 1:
        probs = keep_top_p(probs, top_p)
    idle = torch.zeros(1, dtype=torch.float64)
    drawn = [idle if one is None else torch.rand(1, dtype=torch.float64, generator=one) for one in generators]
    index, total = pick(probs, torch.stack(drawn).to(logits.device))
    lawful = probs.gather(1, index) > 0  # a sum of sums may lie an ulp beside the sum
    return torch.where(lawful, index, probs.argmax(-1, keepdim=True))[:, 0].masked_fill(total.isnan(), PADDING)


def pick(probs: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> tuple[Int[Tensor, "B 1"], Float[Tensor, " B"]]:
    """The first token up to which the probabilities exceed ``uniform`` of their sum, and that sum, in float64.

    Summed by blocks first: running over a large vocabulary took half as long as a forward of many rows.
    """
    blocks = pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    aim = uniform * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp(max=upto.shape[-1] - 1)
    aim = aim - pad(upto, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    within = torch.searchsorted(inside, aim, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + within).clamp(max=probs.shape[-1] - 1), upto[:, -1]


def keep_top_p(probs: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"]:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p (transformers' rule: of equally likely ones
    the first go first); the likeliest stays.

    Only the likeliest tokens are sorted, more of them for rows in which they do not reach ``top_p``: sorting all of a
    large vocabulary took longer than a forward of many rows.
    """
    return _keep(probs, probs.sum(-1, keepdim=True, dtype=torch.float64) - (1 - top_p), LIKELIEST)


def _keep(probs: Float[Tensor, "B V"], mass: Float[Tensor, "B 1"], count: int) -> Float[Tensor, "B V"]:
    """The likeliest tokens, as long as those before them have less than ``mass``; ``count`` are looked at first."""
    likeliest, index = probs.topk(min(count, probs.shape[-1]), -1)
    above = likeliest.double().cumsum(-1) - likeliest
    kept = (above < mass).sum(-1, keepdim=True).clamp(min=1)
    last = likeliest.gather(-1, kept - 1)
    # Of those as likely as the last one, the ones behind in the vocabulary stay.
    equal, likelier = likeliest == last, likeliest > last
    behind = index.masked_fill(~equal, -1).sort(-1, descending=True).values
    first = behind.gather(-1, (kept - likelier.sum(-1, keepdim=True) - 1).clamp(min=0))
    stays = likelier | (equal & (index >= first)) | likeliest.isnan()
    found = torch.zeros_like(probs).scatter_(-1, index, likeliest * stays)
    if count < probs.shape[-1]:
        short = ~(last > likeliest[:, -1:])[:, 0]  # or others as likely are not among these
        if short.any():
            found[short] = _keep(probs[short], mass[short], count * MORE)
    return found
