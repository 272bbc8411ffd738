"""Which kernel an unrolled draft's causal attention runs on.

    CPU, while fusing          plain products and compiled passes, query groups unrepeated
    CPU                        torch's CPU flash kernel, one call a document, query groups unrepeated
    CUDA, bfloat16, float16    flash attention on packed rows: one call for all documents (compute capability 8.0)
    CUDA, float32              memory-efficient attention, one call a document, keys repeated for their query group;
                               and bfloat16, float16 on older devices
    anything else              the plain formula, one document's score matrix at a time (CUDA float64: for tests)

All are the same function (:class:`eagle3_lab.draft.attention.flash.Kernel`).
"""

from __future__ import annotations

import torch

from eagle3_lab.backend.compile import is_fusing
from eagle3_lab.draft.attention.cpu_blocked import Blocked
from eagle3_lab.draft.attention.flash import Efficient, FlashCPU, FlashPacked, Kernel, Plain


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for tensors of this kind: see the table above."""
    if device.type == "cpu":
        return Blocked() if is_fusing() else FlashCPU()
    if device.type != "cuda" or dtype == torch.float64:
        return Plain()
    if dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0):
        return Efficient()
    return FlashPacked()
