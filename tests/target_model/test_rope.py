"""Rotary embeddings: of configurations old and new, and of a draft, which turns as its target does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_targets import random_target

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.rope import fields_of, rope_parameters, rotary_of, written_fields
from eagle3_lab.types import Rotary

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("rope", [DEFAULT, LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_a_draft_turns_by_its_targets_kind_at_its_own_head_width_too(rope: dict[str, Any]) -> None:
    target = random_target(rope_parameters=rope)
    position = torch.tensor([[0, 1, 77, 200]])
    like = target.model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), position)
    for head_dim in (None, 12):
        draft = Eagle3(head_dim=head_dim)
        source = FusedFeature()
        draft.build(target, source.build(target), torch.arange(9))
        told = rotary_of(fields_of(target.model.config), head_dim or 8)
        torch.testing.assert_close(draft.rotary.inv_freq, told.inv_freq)
        assert draft.rotary.scale == pytest.approx(told.scale)
        if head_dim is None:  # the target's own module, asked directly
            for mine, theirs in zip(draft.rotary.cos_sin(position), like, strict=True):
                torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)


def test_the_kinds_differ_where_it_matters() -> None:
    far = torch.tensor([[150]])
    turned = [rotary_of(written_fields(rope), 8).cos_sin(far)[0] for rope in (DEFAULT, LINEAR, LLAMA3, YARN)]
    for i, one in enumerate(turned):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in turned[:i])


def test_linear_divides_and_the_default_is_the_formula() -> None:
    plain = rotary_of({"rope_theta": 100.0}, 4)
    torch.testing.assert_close(plain.inv_freq, torch.tensor([1.0, 0.1]))
    halved = rotary_of({"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4)
    torch.testing.assert_close(halved.inv_freq, plain.inv_freq / 2)
    assert rotary_of({}, 4).inv_freq[1] == pytest.approx(0.01)  # base 10000 where none is named


def test_both_ways_of_writing_mean_the_same() -> None:
    for rope in (DEFAULT, LINEAR, LLAMA3, YARN):
        older = {name: value for name, value in written_fields(rope).items() if name != "rope_parameters"}
        assert rope_parameters(older) == rope_parameters(written_fields(rope)) == rope
        assert rope_parameters({"rope_parameters": rope}) == rope
    assert rope_parameters({"rope_scaling": None, "rope_theta": 7.0}) == {"rope_type": "default", "rope_theta": 7.0}


def test_of_a_rope_by_layer_type_the_full_layers_is_meant() -> None:
    by_type = {
        "sliding_attention": DEFAULT,
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    assert rope_parameters({"rope_parameters": by_type, "rope_theta": 1e4}) == by_type["full_attention"]


@pytest.mark.parametrize(
    ("older", "message"),
    [
        ({"rope_theta": 5e5}, "rope_theta is 10000.0 in rope_parameters and 500000.0 in the older"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "factor is 2.0 in rope_parameters and 4.0"),
        ({"rope_scaling": YARN}, "rope_type is linear in rope_parameters and yarn"),
    ],
)
def test_two_ropes_that_contradict_each_other_are_refused(older: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rotary_of({"rope_parameters": LINEAR} | older, 8)
    rotary_of({"rope_parameters": LINEAR, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4}, 8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "spiral"])
def test_kinds_that_depend_on_the_batch_or_that_nobody_knows_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UserError, match=f"rope type '{kind}': one of default, linear, llama3, yarn is needed"):
        rotary_of({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, 8)


def test_a_kind_without_its_number_is_refused() -> None:
    with pytest.raises(UserError, match="rope type 'linear': no factor"):
        rotary_of({"rope_scaling": {"type": "linear"}}, 8)


def test_a_target_that_turns_part_of_a_head_needs_a_base_for_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    monkeypatch.setattr(target, "rotary", lambda head_dim=None: Rotary(torch.ones(2)))
    with pytest.raises(ValueError, match="draft.rope_base must be a number for llama, .* turns 4 of 8 dimensions"):
        Eagle3().build(target, 32, torch.arange(9))
    Eagle3(rope_base=10000.0).build(target, 32, torch.arange(9))
