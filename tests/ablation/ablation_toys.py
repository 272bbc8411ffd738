"""A small ablation on the tiny target, two heads with one seed, in its own folder; its command lines in process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tiny import TinyLab

from eagle3_lab.__main__ import main
from eagle3_lab.ablation.plan import Ablation, read_ablation

FILE = """\
question: Does a deeper unroll help?
base:
  name: tiny
  target: {{model: {target}}}
  data: {{path: {data}, max_length: 96, row_length: 128}}
  model:
    features: FusedFeature
    draft: Eagle3
    unroll: {{depth: 2}}
    losses: [SoftCE]
    draft_vocab: 64
  optimizer: {{lr: 3.0e-2}}
  trainer: {{max_steps: 6, products: float32, gradient_clip_val: 0.5, val_check_interval: 3, limit_val_batches: 1}}
  features: {{dtype: float32}}
  tracking: {{folder: {runs}}}
cells:
  deep: {{}}
  flat: {{model: {{unroll: {{depth: 1}}}}}}
figures: [tau, n_alpha]
"""


@dataclass(frozen=True)
class Ran:
    """What a command line left: its exit status and both streams."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Toy:
    """An ablation's folder and the folder of its runs."""

    folder: Path
    runs: Path

    def run(self, verb: str, *words: str) -> Ran:
        """One command line of this ablation, in process."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([verb, str(self.folder), *words])
        return Ran(code, out.getvalue(), err.getvalue())

    def change(self, old: str, new: str) -> None:
        """Change the file."""
        file = self.folder / "ablation.yaml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def read(self) -> Ablation:
        return read_ablation(self.folder)


def make_toy(tiny: TinyLab, folder: Path, name: str = "depth") -> Toy:
    """Write the ablation below ``folder``."""
    toy = Toy(folder / "ablations" / name, folder / "mlruns")
    toy.folder.mkdir(parents=True)
    text = FILE.format(target=tiny.target, data=tiny.data, runs=toy.runs)
    (toy.folder / "ablation.yaml").write_text(text)
    return toy
