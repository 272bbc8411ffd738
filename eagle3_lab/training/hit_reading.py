"""Reading a head on held-out greedy text without decoding: one unrolled pass gives the hit table.

Everything runs in the target's own dtype, as the decoder does, whatever format training used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.training.hit_table import HitTable, find_answers, judged_drafts, leading_hits, walk_table
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch, Round


@dataclass(frozen=True)
class DocumentHits:
    """One document's counts: ``visited`` of the walked rounds of its answers; of all anchors, ``reached[n]`` anchors
    could judge draft n and had all n drafts before it right, ``passed[n]`` of them had draft n right too;
    ``whole`` anchors have all their drafts within the answer, ``leading`` of their first drafts are right in a row."""

    visited: Acceptance
    reached: tuple[int, ...]
    passed: tuple[int, ...]
    whole: int
    leading: int


@dataclass(frozen=True)
class HitReading:
    """``readings`` as :class:`HitTable` names them; ``answers`` the walked rounds of each answer, in reading order,
    for intervals; ``visited`` their sum; ``documents`` both readings of each document, in reading order."""

    readings: dict[str, float]
    answers: list[list[Round]]
    visited: Acceptance
    documents: list[DocumentHits]


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
    documents: list[DocumentHits] = []
    for batch in batches:
        here = batch.to(device)
        out = module.judge(here)
        hit = module.judging.table(out.hit)
        table.update(hit, here.supervised, here.document)
        walked = walk_table(hit, here.supervised, here.document)
        answers += walked
        documents += _by_document(hit.cpu(), batch.to("cpu"), walked)
        on_tokens(int((batch.document >= 0).sum()))
    readings = {name: float(value) for name, value in table.compute().items()}
    visited = Acceptance.of((r for rounds in answers for r in rounds), depth)
    return HitReading(readings, answers, visited, documents)


def _by_document(hit: Bool[Tensor, "B T S"], batch: Batch, walked: list[list[Round]]) -> list[DocumentHits]:
    """Count each document of a batch, in reading order; ``walked``: the rounds of its answers, as `walk_table` has
    them."""
    depth, document = hit.shape[-1], batch.document
    depths = torch.arange(depth)
    judged = judged_drafts(batch.supervised, document, depth)
    leading = leading_hits(hit, judged)
    rounds: dict[tuple[int, int], list[Round]] = {}
    for answer, several in zip(find_answers(batch.supervised, document), walked, strict=True):
        rounds.setdefault((answer.row, int(document[answer.row, answer.last])), []).extend(several)
    made: list[DocumentHits] = []
    for row in range(document.shape[0]):
        for number in range(int(document[row].max()) + 1):
            mine = document[row] == number
            ahead, can = leading[row][mine], judged[row][mine]
            made.append(
                DocumentHits(
                    Acceptance.of(rounds.get((row, number), []), depth),
                    tuple((can & (ahead[:, None] >= depths)).sum(0).tolist()),
                    tuple((ahead[:, None] > depths).sum(0).tolist()),
                    int(can[:, -1].sum()),
                    int(ahead[can[:, -1]].sum()),
                )
            )
    return made
