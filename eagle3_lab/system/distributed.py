"""Which of a training's processes this is, as whoever started it says in the environment: torchrun, SLURM, Kubernetes,
or Lightning's own launcher, which runs the command line once more for each further process.

The first process makes what is missing, logs, saves and measures; the others wait for what it makes, train with it and
leave. This is asked before there is a process group: making a target or answers may take longer than a collective
waits. What is waited for is a file, so the caches and the tracking folder of all processes must be the same folders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

EVERY = 0.5  # seconds between two looks at what another process makes


def is_first() -> bool:
    """Whether this process is the one that makes, logs and saves: rank 0, or the only one there is."""
    if (rank := os.environ.get("RANK")) is not None:
        return int(rank) == 0
    if (local := os.environ.get("LOCAL_RANK")) is not None:  # Lightning's launcher counts on each node
        return int(local) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0
    return int(os.environ.get("SLURM_PROCID", "0")) == 0


def local() -> int:
    """This process's number on its machine, which is its accelerator's."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def wait_for(made: Callable[[], bool]) -> None:
    """Wait until what the first process makes is there. Whoever started the processes ends them if it fails."""
    while not made():
        time.sleep(EVERY)


def part() -> None:
    """End the process group, once all have come so far: the first process goes on alone, and no metric or checkpoint
    of its may wait for others that have left."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
