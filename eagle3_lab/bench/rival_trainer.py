"""A rival trainer's step beside ours: its own Python, reached over pipes, one step when it is asked for one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from eagle3_lab.bench import rivals
from eagle3_lab.errors import UserError
from eagle3_lab.system.files import is_file
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch

SCRIPT = Path(rivals.__file__).with_name("speculators_step.py")


class Rival:
    """speculators' EAGLE-3 step at a module's and a batch's sizes.

    Raises:
        UserError: a Python that is not there, an environment without speculators, or a step that fails.
    """

    def __init__(self, python: Path, module: DraftModule, batch: Batch, products: str) -> None:
        if not is_file(python):
            raise UserError(f"--rival: no file {python}; the Python of an environment that `make bench-rival` makes")
        if batch.ids.shape[0] != 1:
            raise UserError(
                f"--rival: trains one packed row at a time, the batch has {batch.ids.shape[0]}; --data.rows_per_batch 1"
            )
        self._python = python
        self._process = subprocess.Popen(
            [str(python), "-I", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.described = self._ask(_shape(module, batch, products))

    def step(self) -> dict[str, Any]:
        """One step: seconds, cpu_seconds, loss, peak_bytes."""
        return self._ask({"step": True})

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            _, said = process.communicate()
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(
                f"--rival: {self._python} ended ({last}); `make bench-rival` makes an environment that runs"
            )
        return json.loads(answer)


def _shape(module: DraftModule, batch: Batch, products: str) -> dict[str, Any]:
    spec = module.target.spec
    return {
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "layers": module.draft.num_layers,
        "vocab": spec.vocab,
        "draft_vocab": module.draft.vocab.shape[0],
        "taps": len(module.source.layers(spec.layers)),
        "depth": module.unroll.depth,
        "dtype": "bfloat16" if products == "bf16-mixed" else "float32",
        "threads": torch.get_num_threads(),
        "device": str(batch.ids.device),
        "document": batch.document[0].tolist(),
        "supervised": batch.supervised[0].tolist(),
    }
