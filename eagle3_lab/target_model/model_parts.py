"""Parts of a transformers model, whatever its family calls them: decoder blocks, rotary embedding, hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.decodable import text_decoder
from eagle3_lab.target_model.windows import FULL
from eagle3_lab.types import Rotary

if TYPE_CHECKING:
    import transformers


_FREQUENCIES = {"inv_freq": "attention_scaling", f"{FULL}_inv_freq": f"{FULL}_attention_scaling"}
"""Names of a rotary module's frequencies and of their scale; where each layer type has its own (gemma3), the full
layers' are what a draft turns by."""


def rotary_module(model: transformers.PreTrainedModel) -> nn.Module:
    """The one rotary module; drafts take their frequencies from it."""
    found = [m for m in text_decoder(model).modules() if not _FREQUENCIES.keys().isdisjoint(m._buffers)]
    if len(found) != 1:
        raise UserError(
            f"target: {len(found)} rotary embeddings found in {type(model).__name__}, where a draft takes its own from "
            "one; set model.draft.rope_base to a number"
        )
    return found[0]


def rotary_of_module(module: nn.Module) -> Rotary:
    (name,) = _FREQUENCIES.keys() & module._buffers.keys()
    inv_freq = module._buffers[name]
    assert inv_freq is not None
    return Rotary(inv_freq.detach().clone(), float(vars(module)[_FREQUENCIES[name]]))


@contextmanager
def tapped_states(blocks: nn.ModuleList, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states with ids in ``layers`` during one forward.

    Id i < n is the input of block i (the embedding for 0): a pre-hook sees it before any norm.
    """
    # Every key exists beforehand: a dict that grows inside a compiled forward costs a recompile.
    taken: dict[int, Tensor] = {}

    def take(layer: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            taken[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [blocks[i].register_forward_pre_hook(take(i), with_kwargs=True) for i in layers if i < len(blocks)]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
