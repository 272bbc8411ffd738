"""The first blocks of a Hugging Face causal LM as a language model of its own, to be trained.

It is the target's own model object, copied but for the blocks left out, so that whatever its family does between
embedding and head is done here too, and run by the target's own adapter: packed rows in training, a slot cache in
decoding. Embedding and head, the larger part of a small model, are the target's own tensors unless they are trained.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle3_lab.backend.prepacked_linear import join
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import LanguageModel, Session, Target
from eagle3_lab.types import Batch, Needs, TargetSpec

if TYPE_CHECKING:
    import transformers  # takes a second

_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # lists that a configuration keeps, an entry a block


class Truncated(LanguageModel):
    """A target's first ``count`` blocks between its embedding and its final norm and head.

    Trained parameters are kept in float32, where the target's are narrower, since small updates would be lost. It comes
    in training mode, as every new module does.

    Args:
        target: what is copied; nothing of it changes.
        model: the target's model.
        blocks: the model's decoder blocks.
        count: how many blocks.
        run: makes of the short model and its sizes what runs it, as the target itself is run.
        train_embedding: embedding and head are copies and trained, tied where the target's are; False: they are the
            target's own and no parameters (not saved in a state dict, not trained).

    Raises:
        ValueError: ``count`` outside 1 .. the target's blocks.
    """

    def __init__(
        self,
        target: Target,
        model: transformers.PreTrainedModel,
        blocks: nn.ModuleList,
        count: int,
        run: Callable[[transformers.PreTrainedModel, TargetSpec], Target],
        *,
        train_embedding: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= count <= target.spec.layers:
            raise ValueError(f"layers must be within 1..{target.spec.layers}, the target's, got {count}")
        name = f"{target.spec.name}, first {count} of {target.spec.layers} layers"
        self.spec = replace(target.spec, name=name, layers=count, weights_hash="")
        self.model = _cut(model, blocks, count)
        wide = torch.promote_types(target.dtype, torch.float32)
        self._held = _own(self.model, wide, train_embedding)
        self._run = run(self.model, self.spec)
        join(self.model, lambda: self.model(torch.zeros(1, 2, dtype=torch.long)))
        # The adapter freezes what it is given, for decoding; what is left as a parameter here is trained.
        self.model.requires_grad_(True).train()

    def forward(self, batch: Batch) -> Float[Tensor, "B T D"]:
        top = self._run.read(batch, Needs(top=True)).top
        assert top is not None
        return top

    def logits(self, top: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        return self._run.logits(top)

    def open(self, batch: int, capacity: int, needs: Needs) -> Session:
        return self._run.open(batch, capacity, needs)

    def save(self, folder: Path) -> None:
        if folder.exists():
            raise UserError(f"{folder}: is there already; name a new folder")
        state = self.model.state_dict() | {name: self.model.get_buffer(name) for name in self._held}
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
                making = Path(name) / "model"
                self.model.save_pretrained(making, state_dict=state)
                self._run.tokenizer.save_pretrained(making)
                os.replace(making, folder)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({error.strerror}); name a folder that can be written"
            ) from None


def _tables(model: transformers.PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Embedding and head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Module) and isinstance(head, nn.Module)
    return embedding, head


def _cut(model: transformers.PreTrainedModel, blocks: nn.ModuleList, count: int) -> transformers.PreTrainedModel:
    """A copy with the first ``count`` blocks; the others are never copied, embedding and head are shared."""
    kept = nn.ModuleList()
    memo: dict[int, object] = {id(blocks): kept}  # what a deep copy takes as copied already
    memo |= {id(shared): shared for table in _tables(model) for shared in table.parameters(recurse=False)}
    short = copy.deepcopy(model, memo)
    kept.extend(copy.deepcopy(block, memo) for block in blocks[:count])
    config = short.config.get_text_config(decoder=True)
    said = config.to_dict()
    for name in _PER_LAYER:
        if said.get(name) is not None:
            setattr(config, name, said[name][:count])
    config.num_hidden_layers = count
    return short


def _own(model: transformers.PreTrainedModel, dtype: torch.dtype, train_embedding: bool) -> list[str]:
    """Make embedding and head either trained copies, or constants that move with the model and are no part of its
    state; every parameter in ``dtype``. Returns the constants' names."""
    names = {id(module): name for name, module in model.named_modules()}
    made: dict[int, Tensor] = {}  # one tensor for both where they are tied
    held = []
    for table in _tables(model):
        for name, shared in list(table.named_parameters(recurse=False)):
            if id(shared) not in made:
                value = shared.detach().to(dtype, copy=train_embedding)
                made[id(shared)] = nn.Parameter(value) if train_embedding else value
            delattr(table, name)
            if train_embedding:
                setattr(table, name, made[id(shared)])
            else:
                table.register_buffer(name, made[id(shared)], persistent=False)
                held.append(f"{names[id(table)]}.{name}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return held
