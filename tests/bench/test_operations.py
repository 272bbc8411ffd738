"""Model operations: the counted ones are the formula's, for any sizes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from random_targets import random_target

from eagle3_lab.bench.operations import count
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.types import Batch

HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 32, 48, 4, 2, 97
DRAFT_VOCAB, DEPTH = 40, 3


def two_documents() -> Batch:
    """One row of 24: documents of 10 and 12 tokens, and two rows of padding."""
    document = torch.tensor([[0] * 10 + [1] * 12 + [-1] * 2])
    position = torch.cat((torch.arange(10), torch.arange(12), torch.zeros(2).long()))[None]
    return Batch(torch.arange(24)[None] % VOCAB, document >= 0, position, document)


def taps(count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 24, HIDDEN) for _ in range(count))


@pytest.mark.parametrize("head", ["target", "frozen"])
def test_an_eagle3_step_is_counted_as_the_formula_says(head: Literal["target", "frozen"]) -> None:
    target, source, draft = random_target(dtype=torch.float32), FusedFeature(), Eagle3(head=head)
    draft.build(target, source.build(target), torch.arange(DRAFT_VOCAB))
    found = count(source, draft, DEPTH, two_documents(), taps(3))

    hq, hkv, h = HIDDEN, HIDDEN // HEADS * KV_HEADS, HIDDEN
    per_row = 4 * h * hq + 8 * h * hkv + 2 * hq * h + 6 * h * MLP
    assert found.projections == 24 * (3 * DEPTH * per_row + 12 * h * h)
    assert found.head == 24 * DEPTH * 2 * h * DRAFT_VOCAB * (3 if head == "target" else 2)
    assert found.attention == 3 * DEPTH * 2 * hq * (10 * 10 + 12 * 12)
    assert found.total == found.projections + found.head + found.attention


def test_an_eagle1_step_speaks_through_the_frozen_head_of_the_target() -> None:
    target, source, draft = random_target(dtype=torch.float32), TopFeature(), Eagle1()
    draft.build(target, source.build(target), torch.arange(VOCAB))
    found = count(source, draft, 1, two_documents(), taps(1))
    h, hkv = HIDDEN, HIDDEN // HEADS * KV_HEADS
    fuse, layer = 2 * 2 * h * h, 2 * h * (2 * h + 2 * hkv) + 6 * h * MLP
    # nothing before the first map is trained, so its input wants no gradient
    assert found.projections == 24 * (2 * fuse + 3 * layer)
    assert found.head == 24 * 2 * 2 * h * VOCAB
