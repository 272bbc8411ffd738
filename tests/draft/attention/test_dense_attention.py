"""The unrolled attention: its mask drawn by hand, and its sums against a plain loop."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_lab.draft.attention.dense import DenseUnrolled, causal_within, rotate
from eagle3_lab.draft.llama import plain_rotary
from eagle3_lab.types import PADDING, Rows


def test_step_zero_sees_its_own_document_up_to_itself() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, PADDING]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert causal_within(document)[0].int().tolist() == expected


def test_padding_rows_do_not_see_one_another() -> None:
    document = torch.tensor([[PADDING, PADDING, 0]])
    assert causal_within(document)[0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_rotation_turns_each_half_pair_by_its_own_angle() -> None:
    cos, sin = plain_rotary(100.0, 4).cos_sin(torch.tensor([[3]]))
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]])
    slow = torch.tensor(0.3)  # pair 0 turns by 3, pair 1 by 3 / 100 ** (2 / 4)
    fast = torch.tensor(3.0)
    expected = torch.stack((fast.cos(), -2 * slow.sin(), fast.sin(), 2 * slow.cos()))
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0, 0], expected)


def attend_by_hand(q: Tensor, keys: list[Tensor], values: list[Tensor], document: Tensor) -> Tensor:
    """One row and head at a time."""
    out = torch.zeros_like(q)
    batch, heads, length, width = q.shape
    for b in range(batch):
        for head in range(heads):
            kv = head // (heads // keys[0].shape[1])
            for t in range(length):
                alone = document[b, t] == PADDING
                seen = [u for u in range(t + 1) if u == t or (not alone and document[b, u] == document[b, t])]
                k = torch.stack([keys[0][b, kv, u] for u in seen] + [key[b, kv, t] for key in keys[1:]])
                v = torch.stack([values[0][b, kv, u] for u in seen] + [value[b, kv, t] for value in values[1:]])
                out[b, head, t] = (k @ q[b, head, t] / width**0.5).softmax(0) @ v
    return out


def test_each_step_equals_a_loop_over_rows_heads_and_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    document = torch.tensor([[0, 0, 0, 1, 1, PADDING], [0, 0, 0, 0, 0, 0]])
    rows = Rows(position=torch.zeros_like(document), document=document)
    context = DenseUnrolled()
    keys: dict[int, list[Tensor]] = {0: [], 1: []}
    values: dict[int, list[Tensor]] = {0: [], 1: []}
    for _ in range(3):
        for layer in (0, 1):
            q = torch.randn(2, 6, 6, 4, dtype=torch.float64, generator=draw)
            k, v = torch.randn(2, 2, 2, 6, 4, dtype=torch.float64, generator=draw)
            keys[layer].append(k)
            values[layer].append(v)
            got = context.attend(layer, q, k, v, rows)
            torch.testing.assert_close(got, attend_by_hand(q, keys[layer], values[layer], document))


def test_scores_in_a_narrow_dtype_are_normalised_in_float32() -> None:
    # 300 equal scores: in bfloat16 the weights would sum to something else than 1
    document = torch.zeros(1, 300, dtype=torch.int64)
    q = torch.zeros(1, 1, 300, 4, dtype=torch.bfloat16)
    v = torch.ones(1, 1, 300, 4, dtype=torch.bfloat16)
    out = DenseUnrolled().attend(0, q, q, v, Rows(position=document, document=document))
    assert out.dtype == torch.bfloat16
    assert (out - 1).abs().max() <= 2**-8
