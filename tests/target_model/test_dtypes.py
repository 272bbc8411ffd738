from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from eagle3_lab.target_model.loading import TargetChoice


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_a_format_in_which_no_model_computes_is_refused_by_its_key(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    fault = f"target.dtype must be one of float16, bfloat16, float32, float64, got {name}"
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        TargetChoice(dtype=dtype)


def test_every_other_format_is_taken() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert replace(TargetChoice(), dtype=dtype).dtype == dtype
