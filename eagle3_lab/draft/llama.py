"""Llama's decoder layer, as every head here uses it: sizes, rope angles, RMSNorm, attention, SwiGLU.

Sizes are the target's unless an option says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.backend.compile import fusible
from eagle3_lab.draft.attention.dense import rotate
from eagle3_lab.interfaces import Context, FrozenTarget
from eagle3_lab.types import Rotary, Rows


@dataclass(frozen=True)
class Body:
    """Sizes of a draft's layers; None is the target's own. ``rope_base`` None is the target's rotary embedding, a
    number the plain one of that base. ``rms_eps`` is that of the norms.

    Raises:
        ValueError: for sizes that fit no target.
    """

    num_layers: int
    intermediate: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    rope_base: float | None
    rms_eps: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "intermediate", "heads", "kv_heads", "head_dim"):
            size = vars(self)[name]
            if size is not None and size < 1:
                raise ValueError(f"draft.{name} must be >= 1, got {size}")
        if self.rope_base is not None and self.rope_base <= 1:
            raise ValueError(f"draft.rope_base must be > 1, got {self.rope_base}")
        if self.rms_eps is not None and self.rms_eps <= 0:
            raise ValueError(f"draft.rms_eps must be > 0, got {self.rms_eps}")

    def fit(self, target: FrozenTarget) -> FittedBody:
        """This body for a target.

        Raises:
            ValueError: for sizes that do not fit this target, or a rotary embedding of part of a head's width.
        """
        spec = target.spec
        heads, kv_heads = self.heads or spec.heads, self.kv_heads or spec.kv_heads
        head_dim, intermediate = self.head_dim or spec.head_dim, self.intermediate or spec.intermediate
        if heads % kv_heads:
            raise ValueError(f"draft.heads must be a multiple of draft.kv_heads, got {heads} and {kv_heads}")
        if head_dim % 2:
            raise ValueError(f"draft.head_dim must be even (rotary pairs), got {head_dim}")
        rotary = target.rotary(head_dim) if self.rope_base is None else plain_rotary(self.rope_base, head_dim)
        if 2 * len(rotary.inv_freq) != head_dim:
            raise ValueError(
                f"draft.rope_base must be a number for {spec.name}, whose own rotary embedding turns "
                f"{2 * len(rotary.inv_freq)} of {head_dim} dimensions of a head"
            )
        rms_eps = self.rms_eps or spec.rms_eps
        return FittedBody(self.num_layers, intermediate, heads, kv_heads, head_dim, rms_eps, RopeAngles(rotary))


@dataclass(frozen=True)
class FittedBody:
    """A body whose every size is known, and the rope angles of its rows."""

    num_layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    angles: RopeAngles

    def options(self) -> dict[str, object]:
        """What decides the layers' function beside their weights, as `DraftModel.options` gives it."""
        sizes = {name: value for name, value in vars(self).items() if name != "angles"}
        return sizes | self.angles.options()


class RopeAngles:
    """Cosine and sine of rows' positions. No module, so that a cast of the draft to bfloat16 leaves the frequencies
    alone; they follow the rows' device."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary

    @property
    def rotary(self) -> Rotary:
        """What the angles are made from."""
        return self._rotary

    def options(self) -> dict[str, object]:
        """The base of the frequencies, and where they are not the plain ones of that base, scale and frequencies."""
        frequencies = self._rotary.inv_freq.double().cpu()
        base = float((frequencies[0] / frequencies[1]) ** len(frequencies)) if len(frequencies) > 1 else 1.0
        plain = plain_rotary(base, 2 * len(frequencies)).inv_freq.double()
        scaled = self._rotary.scale != 1 or not torch.allclose(frequencies, plain, rtol=1e-3, atol=0)
        scaling = [self._rotary.scale, *frequencies.tolist()] if scaled else None
        return {"rope_base": float(f"{base:.4g}"), "rope_scaling": scaling}

    def __call__(self, position: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"]]:
        """[B, T, d] each, shared by all layers of a step."""
        if self._rotary.inv_freq.device != position.device:
            self._rotary = Rotary(self._rotary.inv_freq.to(position.device), self._rotary.scale)
        return self._rotary.cos_sin(position)


def plain_rotary(base: float, head_dim: int) -> Rotary:
    """The unscaled rotary embedding: pair i turns by ``position * base ** (-2 i / head_dim)``."""
    return Rotary(base ** -(torch.arange(0, head_dim, 2).float() / head_dim))


Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the rows' rope angles, [B, T, d] each, shared by all layers of a step."""


class RMSNorm(nn.Module):
    """x / rms(x) times a learned weight; computed in float32 (float64 stays), returned in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention over whatever keys the context holds; q, k, v read ``reads`` wide rows."""

    def __init__(self, index: int, reads: int, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, head_dim
        self.q_proj = nn.Linear(reads, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    @staticmethod
    def of(body: FittedBody, index: int, reads: int, width: int) -> SelfAttention:
        """The attention of layer ``index``."""
        return SelfAttention(index, reads, width, body.heads, body.kv_heads, body.head_dim)

    def read(self, x: Float[Tensor, "B T reads"], angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, d), keys and values (B, kv_heads, T, d), the first two turned."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, *angles), rotate(k, *angles), v

    def write(self, attended: Float[Tensor, "B heads T d"]) -> Float[Tensor, "B T D"]:
        """What the heads say together."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # not unflatten, which torch's compiler cannot look through while a LinearMode is active
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, heads, T, d)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Llama's layer: attention on the normed stream, then SwiGLU on it, each added to the un-normed stream.

    ``normed`` False: attention reads the stream as it is, and there is no ``input_layernorm`` weight.
    """

    def __init__(
        self, attention: SelfAttention, width: int, intermediate: int, eps: float, normed: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps) if normed else nn.Identity()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, intermediate)

    def forward(
        self, hidden: Float[Tensor, "B T D"], angles: Angles, rows: Rows, context: Context
    ) -> Float[Tensor, "B T D"]:
        q, k, v = _read(self, hidden, angles)
        return after_attention(self, hidden, context.attend(self.self_attn.index, q, k, v, rows))


@fusible("few")
def _read(layer: DecoderLayer, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention."""
    return layer.self_attn.read(layer.input_layernorm(hidden), angles)


@fusible("few")
def after_attention(layer: DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer, once attention has spoken."""
    hidden = residual + layer.self_attn.write(attended)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
