"""Lists of layer ids: written for both engines, read where the engines agree, refused where nothing settles them."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_lab.errors import UserError
from eagle3_lab.formats.layer_ids import LIST, default_layers, layer_fields, layers_of, nested_list, sglang_reading

BLOCKS = 30


def nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {LIST: list(ids)}}


@pytest.mark.parametrize(
    ("family", "layers", "written"),
    [
        ("llama", (3, 10, 20), (2, 9, 19)),
        ("llama", (0, 10, 30), (-1, 9, 29)),
        ("deepseek_v3", (3, 10, 20), (3, 10, 20)),
        ("deepseek_v3", (2, 10, 20), (1, 9, 19)),
        ("deepseek_v3", (1, 10, 20), None),
        ("gpt_oss", (24, 29, 30), (23, 28, 29)),
    ],
)
def test_the_nested_list_is_written_so_that_sglang_reads_the_layers(
    family: str, layers: tuple[int, ...], written: tuple[int, ...] | None
) -> None:
    assert nested_list(layers, BLOCKS, family) == written
    if written is not None:
        assert sglang_reading(written, BLOCKS, family) == layers
        config = layer_fields(layers, BLOCKS, family)
        assert config[LIST] == list(layers), "what vLLM reads"
        assert layers_of(config, (5,), BLOCKS, family) == layers


def test_layers_that_sglang_cannot_be_given_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SGLang reads no list .* \[1, 10, 20\] .* deepseek_v3; export with --to"):
        layer_fields((1, 10, 20), BLOCKS, "deepseek_v3")


def test_default_layers_are_not_listed() -> None:
    assert layer_fields(default_layers(BLOCKS), BLOCKS, "llama") == {}
    assert layers_of({}, (5,), BLOCKS, "llama") == (2, 15, 27)


@pytest.mark.parametrize(
    ("ids", "ours", "family", "layers"),
    [
        ((1, 14, 26), default_layers(BLOCKS), "llama", (2, 15, 27)),  # the default layers, counted by outputs
        ((2, 15, 27), default_layers(BLOCKS), "llama", (2, 15, 27)),  # and by inputs
        ((3, 10, 20), (3, 10, 20), "llama", (3, 10, 20)),  # the experiment says which
        ((3, 10, 20), (4, 11, 21), "llama", (4, 11, 21)),
        ((3, 10, 20), (2, 15, 27), "deepseek_v3", (3, 10, 20)),  # both engines read the same
        ((24, 29, 30), (2, 15, 27), "llama", (24, 29, 30)),  # there is no state 31
        ((-1, 10, 20), (2, 15, 27), "llama", (0, 11, 21)),  # nor a state -1
    ],
)
def test_a_nested_list_alone_is_read_where_something_settles_it(
    ids: tuple[int, ...], ours: tuple[int, ...], family: str, layers: tuple[int, ...]
) -> None:
    assert layers_of(nested(*ids), ours, BLOCKS, family) == layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            nested(3, 10, 20),
            r"vLLM reads hidden states \[3, 10, 20\] from it, SGLang \[4, 11, 21\]; set model.features",
        ),
        ({LIST: [3, 10, 20]} | nested(5, 12, 22), r"\[3, 10, 20\] at the top and \[5, 12, 22\] in eagle_config"),
        ({LIST: [3, 10, 20], "num_aux_hidden_states": 4}, "num_aux_hidden_states is 4 and 3 layer ids"),
        ({LIST: "3, 10"}, "a list of whole numbers is needed"),
        ({LIST: [3, 3]}, "strictly ascending ids from 0 on"),
        (nested(3, 10, 40), r"ids within 0..30 are needed"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false: a variant"),
    ],
)
def test_a_list_that_nothing_settles_or_that_is_none_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layers_of(config, default_layers(BLOCKS), BLOCKS, "llama")


def test_lists_in_both_places_fit_together_in_either_way_of_counting() -> None:
    for second in ((3, 10, 20), (2, 9, 19)):
        assert layers_of({LIST: [3, 10, 20]} | nested(*second), (5,), BLOCKS, "llama") == (3, 10, 20)
