"""The number formats that a target can run in."""

from __future__ import annotations

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_dtype(key: str, dtype: torch.dtype) -> None:
    """Refuse one in which no whole model computes: integers, complex numbers, eight bits. Raises ValueError."""
    if dtype not in DTYPES:
        legal = ", ".join(_name(one) for one in DTYPES)
        raise ValueError(f"{key} must be one of {legal}, got {_name(dtype)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
