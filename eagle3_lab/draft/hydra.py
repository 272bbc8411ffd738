"""Hydra's heads: Medusa's, each also told which tokens the earlier ones guessed.

Step s of row t is head s. It reads the target's top state at t and the embeddings of x[t+1] .. x[t+1+s] side by side,
through a block that maps them to the target's width, more residual blocks, and a linear head with bias. With a prefix
layer (Hydra++'s) the top state first passes one attention layer over the text so far, and a norm.

Source: Hydra (arXiv 2402.05109); zankner/Hydra 3f39fbd hydra/model/hydra_heads/mlp_head.py:18-39, 85-126,
prefix_mlp_head.py:70-72.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.draft.llama import Body, DecoderLayer, FittedBody, RMSNorm, RopeAngles, SelfAttention
from eagle3_lab.draft.lm_head import HeadPerStep, HeadStart
from eagle3_lab.draft.medusa import ResBlock
from eagle3_lab.interfaces import Context, FrozenTarget
from eagle3_lab.types import Carry, DraftOut, Rows


class JoiningBlock(nn.Module):
    """``res_connection(z) + silu(linear(z))``: from ``reads`` wide rows to ``width`` wide ones."""

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(reads, width)
        self.res_connection = nn.Linear(reads, width)

    def forward(self, z: Float[Tensor, "*rows reads"]) -> Float[Tensor, "*rows D"]:
        return self.res_connection(z) + nn.functional.silu(self.linear(z))


class PrefixLayer(nn.Module):
    """A Llama layer of the target's sizes over the features, and a norm behind it."""

    def __init__(self, target: FrozenTarget, width: int, rope_base: float | None) -> None:
        super().__init__()
        body = Body(1, None, None, None, None, rope_base, None).fit(target)
        eps = target.spec.rms_eps
        attention = SelfAttention.of(body, 0, width, width)
        self.layer = DecoderLayer(attention, width, body.intermediate, eps)
        self.norm = RMSNorm(width, eps)
        self._body: FittedBody = body
        self._angles: RopeAngles = body.angles

    def options(self) -> dict[str, object]:
        """What decides its function beside its weights and the target's sizes, as `DraftModel.options` gives it."""
        return {name: value for name, value in self._body.options().items() if name.startswith(("rope_", "rms_"))}

    def forward(self, features: Float[Tensor, "B T D"], rows: Rows, context: Context) -> Float[Tensor, "B T D"]:
        return self.norm(self.layer(features, self._angles(rows.position), rows, context))


class Hydra(HeadPerStep):
    """Hydra's heads.

    Args:
        heads: how many tokens ahead; the unroll's depth is at most this.
        num_layers: blocks a head, the joining one included.
        prefix: whether an attention layer over the text comes before the heads.
        head: how the linear heads begin: "target" copies the target's rows and trains them, "frozen" keeps one copy
            of them, "random" from scratch.
        rope_base: of the prefix layer; null is the target's own rotary embedding (the public code always takes 10000).

    Raises:
        ValueError: for sizes below 1 or an unknown word; from ``build``, for features of another width than the
            target's.
    """

    mlps: nn.ModuleList
    prefix_layer: PrefixLayer | None

    def __init__(
        self,
        heads: int = 4,
        num_layers: int = 1,
        prefix: bool = False,
        head: HeadStart = "target",
        rope_base: float | None = None,
    ) -> None:
        super().__init__(heads, num_layers, head)
        self.prefix, self.rope_base = prefix, rope_base

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        self.build_heads(target, width, vocab, bias=True)
        self.mlps = nn.ModuleList(self._mlp((2 + s) * width, width) for s in range(self.steps))
        self.prefix_layer = PrefixLayer(target, width, self.rope_base) if self.prefix else None
        self._target = (target,)  # in a tuple, so that no module ever counts the target's weights as the draft's

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        return (features.to(next(self.mlps.parameters()).dtype),)

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        """The carry is the feature and the embeddings of the tokens read so far."""
        feature, *tokens = carry
        if s == 0 and self.prefix_layer is not None:
            feature = self.prefix_layer(feature, rows, context)
        read = (feature, *tokens, self._target[0].embed(ids).to(feature.dtype))
        return DraftOut(head_in=self.mlps[s](torch.cat(read, dim=-1)), carry=read)

    @property
    def num_layers(self) -> int:
        return 1 if self.prefix else 0

    def options(self) -> dict[str, object]:
        layer = {} if self.prefix_layer is None else self.prefix_layer.options()
        return super().options() | {"prefix": self.prefix} | layer

    def _mlp(self, reads: int, width: int) -> nn.Sequential:
        return nn.Sequential(JoiningBlock(reads, width), *(ResBlock(width) for _ in range(self.blocks_each - 1)))
