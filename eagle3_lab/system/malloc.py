"""Memory that a training step frees, kept for the next one.

glibc gives larger arrays back to the system when they are freed, or soon after, asks for them anew, and the system
clears every page of what it hands out. A step asks for the same arrays again and again: on a CPU that costs a tenth of
it (NOTES.md). With other libraries, and on a GPU, where torch keeps memory itself, there is nothing to do.
"""

from __future__ import annotations

import ctypes
import platform

# glibc's malloc.h; the threshold is the largest that it takes
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_FREE, MAPPED_FROM = 2**31 - 1, 32 * 2**20


def keep_freed_memory() -> bool:
    """From here on, this process keeps what it frees, up to 2 GiB, of arrays up to 32 MiB. Whether this system's
    library can do that. Source: glibc's mallopt(3)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_THRESHOLD, MAPPED_FROM), mallopt(M_TRIM_THRESHOLD, KEPT_FREE)])
