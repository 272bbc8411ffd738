"""Settings of the C library's malloc that let a process reuse the memory that it frees.

By default glibc returns larger arrays to the system when they are freed, and the system clears every page that it
allocates. A training step allocates the same arrays again and again, so on a CPU this costs a tenth of its time
(NOTES.md). Other libraries, and torch's allocator on a GPU, need no settings.
"""

from __future__ import annotations

import ctypes
import platform

# Names and the largest threshold from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES, MMAP_BYTES = 2**31 - 1, 32 * 2**20


def keep_freed_memory() -> bool:
    """Let this process reuse freed arrays of up to 32 MiB, 2 GiB in all, and return whether the C library supports it.
    Source: glibc's mallopt(3)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_THRESHOLD, MMAP_BYTES), mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)])
