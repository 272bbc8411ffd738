"""The README's main job in small, as a user runs it: a real process, the embedded target, twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SMALLER = {
    "data.limit": "24",
    "data.held_out": "6",
    "answers.limit": "2",
    "answers.max_new_tokens": "24",
    "trainer.max_steps": "3",
    "trainer.val_check_interval": "3",
    "trainer.limit_val_batches": "1",
    "evaluate.tasks.0.limit": "1",
    "evaluate.max_new_tokens": "12",
}


def fit(folder: Path) -> subprocess.CompletedProcess[str]:
    overrides = [word for key, value in SMALLER.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "eagle3_lab", "fit", "experiments/quickstart.yaml", *overrides]
    command += ["--tracking.folder", str(folder / "mlruns"), "--json", str(folder / "table.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"CI": "1"})


def test_the_quickstart_in_small_closes_with_a_true_table_and_reuses_everything(tmp_path: Path) -> None:
    first = fit(tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    for stage in ("answers:", "training: 3 steps in", "hit table:", "evaluation:"):
        assert stage in first.stderr
    assert "budget 7 min" in first.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    rows = {(row["name"], row["dtype"]): row for row in table["methods"]}
    assert set(rows) == {("vanilla", "float32"), ("vanilla", "bfloat16")} | {
        (name, "float32") for name in ("chain", "static", "dynamic")
    }
    vanilla = rows["vanilla", "float32"]
    for name in ("chain", "static", "dynamic"):
        row = rows[name, "float32"]
        assert row["tokens"] == vanilla["tokens"], "greedy answers are as long as vanilla's"
        assert row["tau"]["value"] >= 1
        assert sum(row["histogram"]) > 0
    assert vanilla["tau"]["value"] == 1
    assert len(table["one_pass"]["n_alpha_all"]) == 7
    assert Path(table["checkpoint"]).is_file()
    assert table["run_id"] in first.stdout

    again = fit(tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    for stage in ("target", "answers", "training", "evaluation"):
        assert f"{stage}: reused (unchanged)" in again.stderr
    assert again.stdout == first.stdout
