"""The hidden states that an EAGLE-3 head reads, as configurations list them: one list, two ways to count, two places.

We count as Hugging Face does: id i is ``hidden_states[i]``, the input of block i. A list at the top of a configuration
counts so as well (vLLM, speculators). A list inside ``eagle_config`` is counted in two ways: vLLM takes it as it is;
SGLang adds 1, since there an id names a block whose output is read, except for some families of targets. Such a list
alone is therefore ambiguous, unless both engines read the same from it or the experiment's own layers are one of the
two readings.

Source: vLLM 0.32.0 v1/worker/gpu_model_runner.py:5256-5285; SGLang 0.5.23 models/llama.py:929-941 (qwen2, qwen3 and
others are equal), models/deepseek_v2.py:3458-3473, models/glm4_moe_lite.py:805-820, models/gpt_oss.py:1338-1352;
sgl-project/sglang PR 25454.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_lab.errors import UserError

LIST = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
COUNT = "num_aux_hidden_states"

AS_THEY_ARE_UNLESS_1 = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")
"""Families whose nested ids SGLang takes as they are, unless the first one is 1."""

AS_THEY_ARE_UP_TO_THE_TOP = ("gpt_oss",)
"""Families whose nested ids SGLang takes as they are where the highest is the number of blocks."""

Layers = tuple[int, ...]


def default_layers(num_layers: int) -> Layers:
    """Return the states that engines read for a head without a list."""
    return 2, num_layers // 2, num_layers - 3


def sglang_reading(nested: Sequence[int], num_layers: int, family: str) -> Layers:
    """Return what SGLang reads from a nested list, for a target of ``num_layers`` blocks whose ``model_type`` is
    ``family``."""
    as_they_are = (family in AS_THEY_ARE_UNLESS_1 and nested[0] != 1) or (
        family in AS_THEY_ARE_UP_TO_THE_TOP and max(nested) == num_layers
    )
    return tuple(nested) if as_they_are else tuple(layer + 1 for layer in nested)


def nested_list(layers: Layers, num_layers: int, family: str) -> Layers | None:
    """Return the nested list from which SGLang reads ``layers``; None where no list does."""
    for candidate in (tuple(layer - 1 for layer in layers), layers):
        if sglang_reading(candidate, num_layers, family) == layers:
            return candidate
    return None


def layer_fields(layers: Layers, num_layers: int, family: str) -> dict[str, Any]:
    """Return the fields from which vLLM and SGLang both read ``layers``; none where they are the default.

    Raises:
        ValueError: layers that SGLang cannot be given for such a target.
    """
    if layers == default_layers(num_layers):
        return {}
    nested = nested_list(layers, num_layers, family)
    if nested is None:
        raise ValueError(
            f"SGLang reads no list of layer ids as {list(layers)} for a target of the family {family}; export "
            "with --to vllm or --to speculators"
        )
    return {
        LIST: list(layers),
        COUNT: len(layers),
        NESTED: {"use_aux_hidden_state": True, LIST: list(nested)},
    }


def layers_of(config: Mapping[str, Any], ours: Layers, num_layers: int, family: str) -> Layers:
    """Return the hidden states that a head reads, by our ids.

    ``ours`` are the experiment's layers: they decide where the configuration can be read in two ways and they are one
    of them.

    Raises:
        UserError: a list that is none, lists that contradict each other, or one that can be read in two ways.
    """
    section = config.get(NESTED) or {}
    if section.get("use_aux_hidden_state") is False:
        raise UserError(f"{NESTED}.use_aux_hidden_state is false: a variant that Eagle3 is not")
    top, nested = _list(config.get(LIST), LIST), _list(section.get(LIST), f"{NESTED}.{LIST}", lowest=-1)
    layers = default_layers(num_layers)
    if top:
        layers = top
        if nested and top not in (nested, sglang_reading(nested, num_layers, family), _outputs(nested)):
            raise UserError(
                f"{LIST} is {list(top)} at the top and {list(nested)} in {NESTED}, which fit together in neither way "
                "of counting; remove the one that is wrong"
            )
    elif nested:
        layers = _settled(nested, ours, num_layers, family)
    count = config.get(COUNT)
    if count not in (None, len(layers)):
        raise UserError(f"{COUNT} is {count} and {len(layers)} layer ids are listed; correct the one that is wrong")
    return layers


def _settled(nested: Layers, ours: Layers, num_layers: int, family: str) -> Layers:
    """Return the one possible reading of a nested list that stands alone."""
    readings = dict.fromkeys((nested, sglang_reading(nested, num_layers, family)))
    possible = [reading for reading in readings if reading[0] >= 0 and reading[-1] <= num_layers]
    if ours in possible:
        return ours
    if len(possible) == 1:
        return possible[0]
    if not possible:
        raise UserError(f"{NESTED}.{LIST} is {list(nested)}; ids within 0..{num_layers} are needed")
    raise UserError(
        f"{NESTED}.{LIST} is {list(nested)} and no such list stands at the top: vLLM reads hidden states "
        f"{list(possible[0])} from it, SGLang {list(possible[1])}; set model.features.layers to those that the head "
        "was trained with"
    )


def _outputs(nested: Layers) -> Layers:
    return tuple(layer + 1 for layer in nested)


def _list(value: object, name: str, lowest: int = 0) -> Layers:
    """Return a configuration's list of ids; empty where there is none."""
    if not value:
        return ()
    if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
        raise UserError(f"{name} is {value!r}; a list of whole numbers is needed")
    ids: Layers = tuple(value)
    if ids[0] < lowest or any(low >= high for low, high in itertools.pairwise(ids)):
        raise UserError(f"{name} is {list(ids)}; strictly ascending ids from {lowest} on are needed")
    return ids
