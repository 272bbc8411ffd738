"""Peak memory of one training step, measured in a process of its own so that nothing else is in it.

    python -m eagle3_lab.bench.memory CONFIG.yaml {with,without} {all,data}

prints one JSON line. On CUDA the peak is the allocator's; on Linux it is the process's high-water mark, set back after
a step that warms up (so the optimizer's state is there), less what the process holds then, with malloc told to map
every larger block by itself and so to give it back.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3_lab.bench.training_setup import Setup
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment, load

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MAPPED_FROM = 65536  # bytes


@dataclass(frozen=True)
class Peaks:
    """Bytes that a step takes at most beyond what is there before and after it, and how that was measured."""

    bytes: int
    method: str


def peaks(experiment: Experiment, *, every_row: bool, with_loss: bool) -> Peaks:
    """Measure one step of an experiment in a process of its own; ``with_loss`` False puts the sum of the heads' inputs
    in the loss's place.

    Raises:
        UserError: a system that does not tell, or a process that fails.
    """
    if not torch.cuda.is_available() and not CLEAR.exists():
        raise UserError("--memory: this system does not tell a process's peak (no /proc); --memory false leaves it out")
    assert experiment.config is not None, "an experiment from the command line has its configuration"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(experiment.config.yaml)
        words = ["with" if with_loss else "without", "all" if every_row else "data"]
        done = subprocess.run(
            [sys.executable, "-m", "eagle3_lab.bench.memory", str(config), *words],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM), "MALLOC_TRIM_THRESHOLD_": str(MAPPED_FROM)},
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--memory: the measuring process ended ({last}); --memory false leaves it out")
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def measure(config: Path, *, with_loss: bool, every_row: bool) -> Peaks:
    """The peak of a step of this process."""
    setup = Setup.of(load(config), every_row)
    step = setup.step(with_loss)
    step()
    setup.module.zero_grad()
    gc.collect()
    device = setup.batch.ids.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return Peaks(torch.cuda.max_memory_allocated(device) - before, "CUDA's allocator")
    CLEAR.write_text("5")  # sets the high-water mark back
    before = _kib("VmRSS")
    step()
    return Peaks((_kib("VmHWM") - before) * 1024, "resident high-water mark")


def _kib(name: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[name].split()[0])


def main(words: list[str]) -> None:
    config, with_loss, rows = words
    found = measure(Path(config), with_loss=with_loss == "with", every_row=rows == "all")
    print(json.dumps({"bytes": found.bytes, "method": found.method}))


if __name__ == "__main__":
    main(sys.argv[1:])
