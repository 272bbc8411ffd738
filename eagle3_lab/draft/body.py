"""The body of a draft: how large its layers are and how its rows turn, by default as in the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.types import FrozenTarget, Rotary


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
