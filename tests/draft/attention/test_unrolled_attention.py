"""The joined attention equals the dense form in value and in every gradient, on every kernel there is to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_lab.backend.compile import fusing
from eagle3_lab.draft.attention import cpu_blocked
from eagle3_lab.draft.attention.cpu_blocked import Blocked
from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.attention.flash import Documents, Efficient, FlashCPU, FlashPacked, Kernel, Plain
from eagle3_lab.draft.attention.select import kernel_for
from eagle3_lab.draft.attention.unrolled import JoinedUnrolled
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Context
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.types import PADDING, Rows

PACKED = torch.tensor([[0, 0, 0, 1, 1, PADDING], [0, 0, 0, 0, 0, 0], [PADDING, 2, 5, 5, PADDING, PADDING]])


def steps_of(
    depth: int, document: Tensor = PACKED, heads: int = 6, kv_heads: int = 2, width: int = 4, **options: Any
) -> list[Tensor]:
    """Random q, k, v of each step, in that order."""
    draw = torch.Generator().manual_seed(depth)
    options = {"dtype": torch.float64} | options
    batch, rows = document.shape
    return [
        torch.randn(batch, n, rows, width, generator=draw).to(**options).requires_grad_()
        for _ in range(depth)
        for n in (heads, kv_heads, kv_heads)
    ]


def unrolled(context: Context, tensors: list[Tensor], document: Tensor = PACKED) -> list[Tensor]:
    """Every step's output."""
    rows = Rows(position=torch.zeros_like(document), document=document)
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return [context.attend(0, q, k, v, rows) for q, k, v in triples]


def values_and_gradients(context: Context, tensors: list[Tensor], document: Tensor = PACKED) -> list[Tensor]:
    outs = unrolled(context, tensors, document)
    draw = torch.Generator().manual_seed(9)
    pulls = [torch.randn(out.shape, generator=draw).to(out) for out in outs]
    total = sum((out * pull).sum() for out, pull in zip(outs, pulls, strict=True))
    return [*outs, *torch.autograd.grad(total, tensors)]


# ---- by hand


def test_documents_are_read_off_with_their_padding() -> None:
    found = Documents.of(PACKED)
    assert found.spans == ((0, 3), (3, 5), (6, 12), (13, 14), (14, 16))
    assert found.padding.tolist() == [5, 12, 16, 17]
    assert found.bounds.tolist() == [0, 3, 5, 6, 12, 13, 14, 16, 18]
    assert found.longest == 6


def test_two_keys_of_one_row_share_the_softmax() -> None:
    document, rows = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    context, q = JoinedUnrolled(), torch.tensor([[[[2.0]]]])
    context.attend(0, q, torch.tensor([[[[0.0]]]]), torch.tensor([[[[1.0]]]]), Rows(rows, document))
    out = context.attend(0, q, torch.tensor([[[[1.0]]]]), torch.tensor([[[[5.0]]]]), Rows(rows, document))
    weight = torch.tensor(2.0).sigmoid()  # scores 0 and 2
    torch.testing.assert_close(out.flatten(), (1 + 4 * weight)[None])


# ---- against the dense form


@pytest.mark.parametrize("heads", [(6, 2), (2, 2), (3, 1)])
def test_every_step_and_gradient_equals_the_dense_form_in_float64(heads: tuple[int, int]) -> None:
    tensors = steps_of(4, heads=heads[0], kv_heads=heads[1])
    told = values_and_gradients(DenseUnrolled(), tensors)
    torch.testing.assert_close(values_and_gradients(JoinedUnrolled(), tensors), told, rtol=1e-10, atol=1e-11)


def test_the_gradient_of_q_and_of_every_key_and_value_is_the_derivative() -> None:
    document = torch.tensor([[0, 0, 1, PADDING]])
    tensors = steps_of(3, document, heads=4, kv_heads=2, width=2)
    assert torch.autograd.gradcheck(
        lambda *given: tuple(unrolled(JoinedUnrolled(), list(given), document)), tensors, atol=1e-7
    )


def test_long_documents_equal_the_dense_form_in_float32() -> None:
    document = torch.cat((torch.zeros(1, 90), torch.ones(1, 200), torch.full((1, 30), PADDING)), dim=1).long()
    tensors = steps_of(3, document, heads=3, kv_heads=1, width=16, dtype=torch.float32)
    told = values_and_gradients(DenseUnrolled(), tensors, document)
    torch.testing.assert_close(values_and_gradients(JoinedUnrolled(), tensors, document), told, rtol=1e-5, atol=2e-6)


def test_bfloat16_is_about_as_near_the_truth_as_the_dense_form() -> None:
    document = torch.cat((torch.zeros(1, 40), torch.ones(1, 90), torch.full((1, 6), PADDING)), dim=1).long()
    tensors = steps_of(3, document, width=16, dtype=torch.bfloat16)
    truth = values_and_gradients(DenseUnrolled(), [x.detach().double().requires_grad_() for x in tensors], document)
    dense = values_and_gradients(DenseUnrolled(), tensors, document)
    joined = values_and_gradients(JoinedUnrolled(), tensors, document)
    for exact, theirs, ours in zip(truth, dense, joined, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm()
        assert (ours - exact).norm() <= 0.01 * exact.norm()


def test_huge_scores_stay_finite() -> None:
    tensors = [x.detach().mul(100).requires_grad_() for x in steps_of(3, dtype=torch.float32)]
    told = values_and_gradients(DenseUnrolled(), tensors)
    found = values_and_gradients(JoinedUnrolled(), tensors)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[:3], told[:3], rtol=1e-4, atol=1e-3)


def test_layers_keep_their_keys_apart() -> None:
    first, second = steps_of(2), [x * 0.5 for x in steps_of(2)]
    rows = Rows(position=torch.zeros_like(PACKED), document=PACKED)
    both = JoinedUnrolled()
    found = [both.attend(n, *(x[3 * s : 3 * s + 3]), rows) for s in (0, 1) for n, x in enumerate((first, second))]
    torch.testing.assert_close(found[::2], unrolled(DenseUnrolled(), first))
    torch.testing.assert_close(found[1::2], unrolled(DenseUnrolled(), second))


def test_an_unlucky_batch_of_padding_alone_is_finite() -> None:
    document = torch.full((2, 3), PADDING)
    found = values_and_gradients(JoinedUnrolled(), steps_of(2, document), document)
    torch.testing.assert_close(found, values_and_gradients(DenseUnrolled(), steps_of(2, document), document))


# ---- in the head


@pytest.mark.parametrize("detach", [False, True])
def test_a_head_of_two_layers_learns_the_same_from_either(
    detach: bool, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(draft=Eagle3(num_layers=2)), make_batch([(9, 3), (6, 2)], [(8, 2)], length=17)
    results = []
    for context in (DenseUnrolled, JoinedUnrolled):
        outs = list(Unroll(4, detach)(lab.draft, lab.source(lab.taps(batch)[0]), batch, context))
        out = UnrolledLoss([SoftCE()])(lab.draft, outs, batch, lab.target, lab.taps(batch)[1])
        results.append([out.steps, *torch.autograd.grad(out.total, list(lab.parameters().values()))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def test_under_autocast_the_head_learns_the_same_to_bfloat16(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(), make_batch([(9, 3), (6, 2)], length=17)
    results = {}
    for context, narrow in ((DenseUnrolled, False), (DenseUnrolled, True), (JoinedUnrolled, True)):
        source, draft = copy.deepcopy(lab.source).float(), copy.deepcopy(lab.draft).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            outs = list(Unroll(3)(draft, source(lab.taps(batch)[0]), batch, context))
        sum(out.head_in.square().sum() for out in outs).backward()
        results[context, narrow] = torch.cat([p.grad.flatten() for p in draft.layers.parameters()])
    truth = results[DenseUnrolled, False]
    theirs, ours = ((results[context, True] - truth).norm() for context in (DenseUnrolled, JoinedUnrolled))
    assert ours <= 1.25 * theirs
    assert ours <= 0.03 * truth.norm()


# ---- the kernels


def agrees(kernel: Kernel, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Forward, and backward under a widened softmax, against the plain formula in float64 on the same numbers."""
    documents = Documents.of(PACKED.to(device))
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in steps_of(1, width=8))
    pull = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).double()
    q, k, v, pull = (x.to(dtype).to(device) for x in (q, k, v, pull))
    real = (PACKED != PADDING).flatten().to(device)
    wide = [x.double() for x in (q, k, v)]
    out, lse = kernel.forward(q, k, v, documents)
    told, told_lse = Plain().forward(*wide, documents)
    torch.testing.assert_close(out[real].double(), told[real], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[real].double(), told_lse[real], rtol=tolerance, atol=tolerance)
    narrow = told.to(dtype)
    found = kernel.backward(pull, q, k, v, narrow, (told_lse + 0.5).to(lse.dtype), documents)
    truth = Plain().backward(pull.double(), *wide, narrow.double(), told_lse + 0.5, documents)
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize("kernel", [FlashCPU(), Blocked(), Plain()])
def test_the_kernels_of_a_cpu_agree(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    agrees(kernel, dtype, "cpu", tolerance)


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 7])
def test_a_document_in_blocks_is_the_document(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_blocked, "POSITIONS", positions)
    agrees(Blocked(), torch.float64, "cpu", 1e-12)


def test_blocks_are_smaller_where_their_scores_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys = torch.zeros(2, 3 * 100, 4, dtype=torch.bfloat16), torch.zeros(2, 100, 4)
    assert [block.keys.stop for block in cpu_blocked._blocks(q, keys, 1)] == [100]
    monkeypatch.setattr(cpu_blocked, "BLOCK_BYTES", 4 * 2 * 3 * 100 * 25)  # the scores of 25 positions
    found = list(cpu_blocked._blocks(q, keys, 2))
    assert [block.keys.stop for block in found] == [25, 50, 75, 100]
    assert (found[1].rows.start, found[1].rows.stop) == (75, 150)
    assert found[1].last.tolist() == [x for x in range(25, 50) for _ in range(3)]
    assert [(x.shape, x.dtype) for x in (*found[1].wide, *found[1].narrow)] == [
        ((2, 75, 50), dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    ]
    monkeypatch.setattr(cpu_blocked, "BLOCK_BYTES", 1)
    assert max(block.last.shape[0] // 3 for block in cpu_blocked._blocks(q, keys, 1)) == 15  # of at most 16, and equal


def test_blocks_in_bfloat16_are_at_least_as_near_the_truth_as_the_flash_kernel() -> None:
    document = torch.cat((torch.zeros(1, 40), torch.ones(1, 190)), dim=1).long()
    documents = Documents.of(document)
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in steps_of(1, document, width=16, dtype=torch.bfloat16))
    wide, pull = [x.double() for x in (q, k, v)], torch.randn_like(q)
    out, lse = Plain().forward(*wide, documents)
    truth = [out, *Plain().backward(pull.double(), *wide, out, lse, documents)]
    off = {}
    for kernel in (FlashCPU(), Blocked()):
        found, told = kernel.forward(q, k, v, documents)
        gradients = kernel.backward(pull, q, k, v, found, told, documents)
        off[type(kernel)] = [(a - b).norm() / b.norm() for a, b in zip((found, *gradients), truth, strict=True)]
    assert all(ours <= max(1.3 * theirs, 0.003) for ours, theirs in zip(off[Blocked], off[FlashCPU], strict=True)), off


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        (FlashPacked(), torch.bfloat16, 3e-2),
        (FlashPacked(), torch.float16, 4e-3),
        (Efficient(), torch.float32, 2e-5),
        (Plain(), torch.float64, 1e-12),
    ],
)
def test_the_kernels_of_a_gpu_agree(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    agrees(kernel, dtype, "cuda", tolerance)


def test_the_calls_to_cuda_kernels_have_the_shapes_their_signatures_ask_for() -> None:
    # on tensors without data: what a machine without CUDA can know of these two
    documents = Documents.of(PACKED)
    for kernel, dtype in ((FlashPacked(), torch.bfloat16), (Efficient(), torch.float32)):
        q, k, v = (x.detach().transpose(1, 2).flatten(0, 1).to("meta", dtype) for x in steps_of(1, width=8))
        there = Documents(documents.spans, documents.padding.to("meta"), documents.bounds.to("meta"), 6)
        out, lse = kernel.forward(q, k, v, there)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:2])
        found = kernel.backward(out, q, k, v, out, lse, there)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_the_cpu_never_runs_the_plain_formula() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert isinstance(kernel_for(torch.device("cpu"), dtype), FlashCPU)
        with fusing():
            assert isinstance(kernel_for(torch.device("cpu"), dtype), Blocked)
