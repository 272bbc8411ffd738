"""An unroll on matrices cast beforehand is the unroll under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.training import precast


def test_steps_and_gradients_are_those_of_autocast(
    make_lab: Callable[..., Any], make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, batch = make_lab(draft=Eagle3(num_layers=2)), make_batch([(9, 3), (6, 2)], length=17)
    source, draft, (taps, _) = lab.source.float(), lab.draft.float(), lab.taps(batch)
    found = {}
    for fused in (False, True):
        monkeypatch.setattr(precast, "is_fusing", lambda fused=fused: fused)  # functions stay plain: casts alone differ
        with torch.autocast("cpu", torch.bfloat16):
            steps = precast.unrolled(Unroll(3), draft, source(taps), batch)
            total = sum((out.head_in.float().square().mean() for out in steps), torch.zeros(()))
        draft.zero_grad()
        total.backward()
        gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
        found[fused] = [out.head_in for out in steps], gradients
    (plain, by_autocast), (cast, by_casts) = found[False], found[True]
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
    assert by_casts.keys() == by_autocast.keys() and len(by_casts) > 14
    for name, gradient in by_autocast.items():
        assert by_casts[name].dtype == torch.float32
        torch.testing.assert_close(by_casts[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_matrices_are_those_of_the_layers(make_lab: Callable[..., Any]) -> None:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    found = list(precast._matrices(make_lab(draft=Eagle3(num_layers=2)).draft))
    assert found == [f"layers.{n}.{part}.weight" for n in (0, 1) for part in parts]
