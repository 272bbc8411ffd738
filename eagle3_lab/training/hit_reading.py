"""Reading a head on held-out greedy text without decoding: one unrolled pass gives the hit table.

Everything runs in the target's own dtype, as the decoder does, whatever format training used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.training.hit_table import HitTable, walk_table
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch, Round


@dataclass(frozen=True)
class HitReading:
    """``readings`` as :class:`HitTable` names them; ``answers`` the walked rounds of each answer, in reading order,
    for intervals; ``visited`` their sum."""

    readings: dict[str, float]
    answers: list[list[Round]]
    visited: Acceptance


@torch.no_grad()
def read_hits(
    module: DraftModule, batches: Iterable[Batch], on_tokens: Callable[[int], None] = lambda n: None
) -> HitReading:
    """The hit table of a head over greedy text, as deep as the module judges.

    Args:
        module: the trained head with its target.
        batches: packed rows of text that this target wrote greedily.
        on_tokens: told how many tokens each batch held.
    """
    module.eval()
    device = next(module.draft.parameters()).device
    depth = module.judging.reach
    table = HitTable(depth).to(device)
    answers: list[list[Round]] = []
    for batch in batches:
        here = batch.to(device)
        out = module.judge(here)
        hit = module.judging.table(out.hit)
        table.update(hit, here.supervised, here.document)
        answers += walk_table(hit, here.supervised, here.document)
        on_tokens(int((batch.document >= 0).sum()))
    readings = {name: float(value) for name, value in table.compute().items()}
    return HitReading(readings, answers, Acceptance.of((r for rounds in answers for r in rounds), depth))
