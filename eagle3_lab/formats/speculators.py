"""EAGLE-3 heads in the layout of vllm-project/speculators, which vLLM serves by itself: the folder names its target.

The Llama fields lie in ``transformer_layer_config``, those of the draft around it. ``norm_before_residual`` is always
written: where it is absent, speculators takes false and vLLM true.

Source: speculators 0.9.0 models/eagle3/config.py, convert/eagle/eagle3_converter.py; vLLM 0.32.0
transformers_utils/configs/speculators/{base,algos}.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eagle3_lab.formats.description import HeadDescription
from eagle3_lab.formats.layer_ids import COUNT, LIST
from eagle3_lab.target_model.hf_target import HFTarget

KEY, KIND = "speculators_model_type", "eagle3"
OF_THE_DRAFT = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    LIST,
)
LLAMA = "transformer_layer_config"
PROPOSED = 3
"""Tokens a round that vLLM drafts unless told otherwise."""


def read(place: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadDescription | None:
    """Return a speculators head; None for another format.

    Raises:
        ValueError: another kind of speculator, or a field that readers take in two ways.
    """
    if KEY not in config:
        return None
    if config[KEY] != KIND:
        raise ValueError(f"{KEY} is {config[KEY]!r}; {KIND!r} is needed")
    if not isinstance(config.get(LLAMA), dict):
        raise ValueError(f"no {LLAMA}, the fields of a Llama configuration")  # noqa: TRY004 - a file's mistake
    if "norm_before_residual" not in config:
        raise ValueError("no norm_before_residual, which speculators then takes for false and vLLM for true; add it")
    flat = config[LLAMA] | {name: config[name] for name in OF_THE_DRAFT if config.get(name) is not None}
    return HeadDescription(place, "EAGLE-3", flat, dict(tensors))


def write(head: HeadDescription, target: HFTarget) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a head. Raises ValueError for what this layout cannot hold."""
    if head.kind != "EAGLE-3":
        raise ValueError(f"speculators 0.9 has no {head.kind}; export with --to official or --to vllm")
    fields = {"norm_before_fc": False} | head.config
    llama = {name: value for name, value in fields.items() if name not in OF_THE_DRAFT}
    llama[COUNT] = len(head.layers)  # vLLM forwards no list to where it counts the states
    architectures = target.model.config.architectures or [type(target.model).__name__]
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": KIND,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        **{name: fields[name] for name in OF_THE_DRAFT if name in fields},
        LIST: list(head.layers),
        LLAMA: llama,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": PROPOSED,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target.source, "architectures": list(architectures)},
        },
    }
    return config, dict(head.tensors)
