"""The unroll: what each row reads, that it drafts as a decoder would, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import drafts_as_serially
from torch import Tensor

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.attention.hass import MultiplicativeUnrolled
from eagle3_lab.draft.attention.unrolled import JoinedUnrolled
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Context, DraftModel
from eagle3_lab.types import Carry, DraftOut, Rows


class Recorder(DraftModel):
    """Writes down what it is given; its carry counts the steps it has been through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], list[int], list[int], int]] = []

    def build(self, target: Any, width: int, vocab: Tensor) -> None: ...

    def start(self, features: Tensor) -> Carry:
        return features, features.new_zeros(features.shape[:2])

    def step(self, carry: Carry, ids: Tensor, rows: Rows, s: int, context: Context) -> DraftOut:
        assert rows.document is not None
        self.seen.append((ids[0].tolist(), rows.position[0].tolist(), rows.document[0].tolist(), s))
        return DraftOut(head_in=carry[0] * 2, carry=(carry[0] * 2, carry[1] + 1))

    def logits(self, head_in: Tensor, s: int) -> Tensor:
        return head_in

    @property
    def vocab(self) -> Tensor:
        return torch.arange(2)

    @property
    def num_layers(self) -> int:
        return 0


def test_row_t_reads_token_t_plus_one_plus_s_at_position_t_plus_s(make_batch: Any) -> None:
    batch = make_batch([(3, 1), (2, 1)], length=6)
    _, b, c, d, e, pad = batch.ids[0].tolist()
    recorder = Recorder()
    list(Unroll(depth=3)(recorder, torch.ones(1, 6, 2), batch))
    document = [0, 0, 0, 1, 1, -1]
    assert recorder.seen == [
        ([b, c, d, e, pad, 0], [0, 1, 2, 0, 1, 0], document, 0),
        ([c, d, e, pad, 0, 0], [1, 2, 3, 1, 2, 1], document, 1),
        ([d, e, pad, 0, 0, 0], [2, 3, 4, 2, 3, 2], document, 2),
    ]


@pytest.mark.parametrize("detach", [False, True])
def test_a_carry_of_several_tensors_is_fed_back_and_cut_as_one(detach: bool, make_batch: Any) -> None:
    features = torch.ones(1, 4, 2, requires_grad=True)
    outs = list(Unroll(depth=3, detach=detach)(Recorder(), features, make_batch([(4, 1)], length=4)))
    assert [out.head_in[0, 0, 0].item() for out in outs] == [2.0, 4.0, 8.0]
    assert [out.carry[1][0, 0].item() for out in outs] == [1.0, 2.0, 3.0]
    assert outs[0].head_in.requires_grad
    assert outs[1].head_in.requires_grad is not detach


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="unroll.depth must be >= 1, got 0"):
        Unroll(depth=0)


def test_judging_goes_deeper_than_training_and_attends_as_decoding_does() -> None:
    trained = Unroll(depth=1, detach=True, attention=MultiplicativeUnrolled)
    judging = trained.judging(4)
    assert (judging.depth, judging.detach, judging.attention) == (4, True, JoinedUnrolled)
    assert (trained.depth, trained.attention) == (1, MultiplicativeUnrolled)
    with pytest.raises(ValueError, match="judged_depth must be >= 1, got 0"):
        trained.judging(0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_parallel_unroll_drafts_as_serial_decoding_does(
    num_layers: int, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    batch = make_batch([(10, 3)], length=10)
    for lab in (
        make_lab(draft=Eagle3(num_layers=num_layers)),
        make_lab(draft=Eagle3(num_layers=num_layers, head="random", embedding="projected", head_dim=10), width=8),
    ):
        drafts_as_serially(Unroll(4), lab.draft, lab.source(lab.taps(batch)[0]), batch)
        drafts_as_serially(Unroll(1).judging(7), lab.draft, lab.source(lab.taps(batch)[0]), batch)


def test_padding_rows_are_finite(make_lab: Callable[..., Any], make_batch: Any) -> None:
    outs = make_lab().unrolled(make_batch([(3, 1)], [(6, 2)], length=6), Unroll(3))
    assert all(out.head_in.isfinite().all() for out in outs)


def gradients(lab: Any, batch: Any, unroll: Unroll, context: Callable[[], Context], step: int) -> dict[str, Tensor]:
    """Gradients, of step ``step`` alone, of every parameter and of the features."""
    features = lab.source(lab.taps(batch)[0]).detach().requires_grad_()
    outs = list(unroll(lab.draft, features, batch, context))
    names = {name: p for name, p in lab.draft.named_parameters() if "lm_head" not in name} | {"features": features}
    found = torch.autograd.grad(outs[step].head_in.square().sum(), list(names.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(names.items(), found, strict=True)}


class WithoutOldKeys(DenseUnrolled):
    """Keys and values cut from the graph once their own step is over."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        for stored in (self._keys, self._values):
            stored[layer] = [old.detach() for old in stored.get(layer, [])]
        return super().attend(layer, q, k, v, rows)


def test_detach_cuts_the_carry_and_leaves_the_keys_in_the_graph(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(), make_batch([(8, 2)], length=8)
    whole = gradients(lab, batch, Unroll(2), DenseUnrolled, step=1)
    cut = gradients(lab, batch, Unroll(2, detach=True), DenseUnrolled, step=1)
    neither = gradients(lab, batch, Unroll(2, detach=True), WithoutOldKeys, step=1)
    assert not torch.allclose(whole["features"], cut["features"])
    assert cut["features"].abs().max() > 1e-6  # through step 0's keys and values only:
    assert neither["features"].abs().max() == 0
