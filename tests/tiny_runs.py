"""An experiment of seconds on the tiny target, and a way to run command lines of it in process."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tiny import TinyLab

from eagle3_lab.__main__ import main

EXPERIMENT = """\
# One EAGLE-3 head for a tiny target.
name: tiny
target: {{model: {target}}}
data: {{path: {data}, max_length: 96, row_length: 128}}
model:
  features: FusedFeature
  draft: Eagle3
  unroll: {{depth: 3}}
  losses: [SoftCE]
  draft_vocab: 64
optimizer: {{lr: 3.0e-3}}
trainer: {{max_steps: 6, products: float32, gradient_clip_val: 0.5, val_check_interval: 3, limit_val_batches: 1}}
evaluate:
  tasks: [{{name: held_out, limit: 2}}]
  max_new_tokens: 8
  methods:
    chain: {{class_path: HeadTree, init_args: {{grow: {{class_path: Chain, init_args: {{length: 3}}}}}}}}
    static: {{class_path: HeadTree, init_args: {{grow: McSim7b63}}}}
    dynamic:
      class_path: HeadTree
      init_args: {{grow: {{class_path: DynamicTree, init_args: {{levels: 3, width: 3, budget: 8}}}}}}
tracking: {{folder: {folder}}}
"""

# A stage's line or one of the choices told beside it: what a run says of itself, complaints left out.
PROGRESS = re.compile(
    r"(target|answers|documents|features|training|hit table|evaluation|engine): "
    r"(\d|reused|resumed|stopped|products|goes on|begins anew)"
)


@dataclass(frozen=True)
class Ran:
    """What a command line left: its exit status and both streams."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """The lines of stderr that are no progress."""
        return [line for line in self.err.splitlines() if not PROGRESS.match(line)]


@dataclass(frozen=True)
class Bench:
    """An experiment's file and the folder in which its runs are kept."""

    yaml: Path
    folder: Path

    def run(self, verb: str, *words: str) -> Ran:
        """One command line of this experiment, in process."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*verb.split(), str(self.yaml), *words])
        return Ran(code, out.getvalue(), err.getvalue())

    def work(self) -> Path:
        """The folder of its one training."""
        (found,) = (self.folder / "work").iterdir()
        return found


def make_bench(tiny: TinyLab, folder: Path) -> Bench:
    """Write the experiment below ``folder``."""
    runs, yaml = folder / "mlruns", folder / "tiny.yaml"
    yaml.write_text(EXPERIMENT.format(target=tiny.target, data=tiny.data, folder=runs))
    return Bench(yaml, runs)
