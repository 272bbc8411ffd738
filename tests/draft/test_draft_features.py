"""Which hidden states a source taps, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle3_lab.draft.features import FusedFeature, TopFeature


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [
        (4, (1, 2, 3)),
        (5, (1, 2, 4)),
        (6, (1, 3, 5)),
        (7, (2, 3, 4)),
        (8, (2, 4, 5)),
        (28, (2, 14, 25)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_default_layers_are_the_official_ones_or_spread_over_a_small_target(
    num_layers: int, ids: tuple[int, ...]
) -> None:
    assert FusedFeature().layers(num_layers) == ids


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_target_too_small_for_the_default_is_refused_unless_layers_are_named(num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"a target of {num_layers} layers"):
        FusedFeature().layers(num_layers)
    assert FusedFeature(layers=[0, 1]).layers(num_layers) == (0, 1)


@pytest.mark.parametrize("layers", [[], [3, 2], [2, 2], [-1, 2], [2, 9]])
def test_layers_that_are_not_ascending_ids_of_the_target_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"features.layers must be ascending ids within 0..8, got \["):
        FusedFeature(layers=layers).layers(8)


def test_the_fused_feature_is_one_bias_free_product_of_the_joined_taps(make_lab: Callable[..., Any]) -> None:
    source = FusedFeature(layers=[1, 4])
    assert source.build(make_lab().target) == 12
    low, high = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    expected = low @ source.fc.weight[:, :12].T + high @ source.fc.weight[:, 12:].T
    torch.testing.assert_close(source((low, high)), expected)
    assert set(source.state_dict()) == {"fc.weight"}


def test_a_normed_source_gives_each_tap_an_rms_norm_of_its_own(make_lab: Callable[..., Any]) -> None:
    source = FusedFeature(layers=[1, 4], normed=True)
    assert source.build(make_lab().target) == 12
    assert set(source.state_dict()) == {"fc.weight", "fc_norm.0.weight", "fc_norm.1.weight"}
    low, high = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    with torch.no_grad():
        source.fc_norm[1].weight.fill_(2.0)
    by_hand = [tap / (tap.square().mean(-1, keepdim=True) + 1e-5).sqrt() for tap in (low, high)]
    expected = by_hand[0] @ source.fc.weight[:, :12].T + 2 * by_hand[1] @ source.fc.weight[:, 12:].T
    torch.testing.assert_close(source((low, high)), expected)
    torch.testing.assert_close(source((1000 * low, high)), expected, rtol=1e-4, atol=1e-5)  # no tap drowns another


@pytest.mark.parametrize("num_layers", [4, 5, 6, 7, 30, 32, 80])
def test_default_layers_are_three_different_states_between_embedding_and_final_norm(num_layers: int) -> None:
    ids = FusedFeature().layers(num_layers)
    assert len(set(ids)) == 3
    assert 0 < min(ids) and max(ids) < num_layers


def test_the_fused_feature_has_the_width_asked_for(make_lab: Callable[..., Any]) -> None:
    source = FusedFeature(layers=[1, 4], width=8)
    assert source.build(make_lab().target) == 8
    assert source((torch.randn(2, 3, 12), torch.randn(2, 3, 12))).shape == (2, 3, 8)
    with pytest.raises(ValueError, match="features.width must be >= 1, or null for the target's, got 0"):
        FusedFeature(width=0)


def test_taps_in_a_narrower_dtype_reach_the_projection_in_its_own(make_lab: Callable[..., Any]) -> None:
    source = FusedFeature(layers=[4])
    source.build(make_lab().target)
    assert source((torch.randn(1, 3, 12, dtype=torch.bfloat16),)).dtype == torch.float32


def test_the_top_feature_is_the_last_state_itself(make_lab: Callable[..., Any]) -> None:
    source = TopFeature()
    top = torch.randn(2, 3, 12)
    assert source.layers(30) == (30,)
    assert source.build(make_lab().target) == 12
    assert source((top,)) is top
    assert not list(source.parameters())
