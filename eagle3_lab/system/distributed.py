"""The number of this process among those that train together, by the variables that torchrun, SLURM, Kubernetes or
Lightning's launcher set.

The first process prepares what is missing, logs, saves and measures; the others wait for its files, train with it and
end. They wait for files and not in a collective operation, which would time out: answers may take hours. So all
processes need the same cache folder and the same tracking folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

EVERY = 0.5  # seconds between two checks


def is_first() -> bool:
    """Return whether this process is the first one (global rank 0), or the only one."""
    if (rank := os.environ.get("RANK")) is not None:
        return int(rank) == 0
    if (local := os.environ.get("LOCAL_RANK")) is not None:  # set by Lightning's launcher, on each node from 0
        return int(local) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0
    return int(os.environ.get("SLURM_PROCID", "0")) == 0


def local_rank() -> int:
    """Return the number of this process on its machine, which is also the number of its accelerator."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def wait_for(is_ready: Callable[[], bool]) -> None:
    """Wait until ``is_ready`` returns True. If the first process fails, the launcher ends the waiting ones."""
    while not is_ready():
        time.sleep(EVERY)


def leave_group() -> None:
    """End the process group when all processes have called this: the first one continues alone, and none of its
    metrics or checkpoints may wait for processes that have ended."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
