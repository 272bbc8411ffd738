"""The GPU check's own path, dry on a CPU, with the libraries out of reach that a bare GPU machine lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("mlflow", "datasets", "omegaconf", "jsonargparse", "lightning", "torchmetrics", "matplotlib")

SCRIPT = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # any import of it raises
from eagle3_lab.bench.gpu_check import main
sys.exit(main(["--dry-run", "--json", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_dry_run_passes_every_part_without_the_libraries_of_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(file.read_text())
    parts = {"decoding", "decoding_captured", "graphs", "agreement", "training", "training_compiled"}
    assert {"machine"} | parts <= found.keys()
    assert not any("failed" in part for part in found.values() if isinstance(part, dict))
    for decoding in (found["decoding"], found["decoding_captured"]):
        assert decoding["vanilla"]["tokens"] == decoding["tree"]["tokens"] == 8
        assert decoding["vanilla"]["tokens_per_s"] > 0
        assert decoding["curves"]["verify"].keys() == {"1", "6"}
        assert decoding["curves"]["draft"].keys() == {"1", "2"}
        assert 0 <= decoding["tree"]["host_share"] <= 1
    graphs = found["graphs"]
    assert graphs.pop("recorded_by") == "Tape"
    assert graphs.keys() >= {"off", "target", "target_and_draft"}
    for name in ("off", "target", "target_and_draft"):
        assert graphs[name]["alike"] == graphs[name]["tokens"] == 8
        assert graphs[name]["tokens_per_s"] > 0
    for name in ("many", "graph"):
        assert found["agreement"][name]["largest_difference"] < 1e-4
    for training in (found["training"], found["training_compiled"]):
        first, *_, last = training["losses"]
        assert last < first


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from eagle3_lab.bench.gpu_check import main

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
