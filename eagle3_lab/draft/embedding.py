"""What embeds a draft's tokens: the target's own table, a projection of it, or a table of the draft's width.

A draft as wide as its target reads the target's embedding, frozen. One of another width cannot. Public heads then carry
a table of their own; a trained projection of the target's table is the smaller way there, and is such a table once it
is multiplied out.

Source: SafeAILab/EAGLE cb7e084 eagle/model/cnets.py:488, 531 (a table of its own where ``target_hidden_size`` is set).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.interfaces import FrozenTarget

Embedding = Literal["target", "projected", "own"]

STD = 0.02
"""Of a table of the draft's own when it begins: Llama's initializer_range."""


class TokenEmbedding(nn.Module):
    """Embeds target ids for a draft of ``width``.

    Parameters: none for "target"; ``proj.weight`` [D, Dt] for "projected"; ``tokens.weight`` [V, D] for "own".

    Raises:
        ValueError: for an unknown kind, or the target's table where the widths differ.
    """

    def __init__(self, kind: Embedding, target: FrozenTarget, width: int) -> None:
        super().__init__()
        spec = target.spec
        if kind not in get_args(Embedding):
            raise ValueError(f"draft.embedding must be one of {', '.join(get_args(Embedding))}, got {kind!r}")
        if kind == "target" and width != spec.hidden:
            raise ValueError(
                f"draft.embedding must be projected or own for a draft of width {width}: the target's embedding is "
                f"{spec.hidden} wide"
            )
        self.proj = nn.Linear(spec.hidden, width, bias=False) if kind == "projected" else None
        self.tokens = nn.Embedding(spec.vocab, width) if kind == "own" else None
        if self.tokens is not None:
            nn.init.normal_(self.tokens.weight, std=STD)
        self._target = (target,)  # in a tuple, so that no module ever counts the target's weights as the draft's

    def forward(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows D"]:
        if self.tokens is not None:
            return self.tokens(ids)
        embedded = self._target[0].embed(ids)
        return embedded if self.proj is None else self.proj(embedded.to(self.proj.weight.dtype))

    @torch.no_grad()
    def table(self) -> Float[Tensor, "V D"] | None:
        """The draft's own table, a projection multiplied out; None where it reads the target's."""
        if self.tokens is not None:
            return self.tokens.weight.detach().clone()
        if self.proj is None:
            return None
        target = self._target[0]
        return self(torch.arange(target.spec.vocab, device=self.proj.weight.device))
