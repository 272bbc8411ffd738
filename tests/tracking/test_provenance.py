"""Where a run came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_lab.tracking.provenance import git_state, machine, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(("git", "-C", folder, *identity, *arguments), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_and_whether_the_checkout_was_touched(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert git_state(tmp_path) == {}  # no commit yet
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    clean = {"git.commit": commit, "git.dirty": "false", "mlflow.source.git.commit": commit}
    assert git_state(package) == clean
    (package / "b.py").write_text("2\n")
    assert git_state(package) == clean | {"git.dirty": "true"}


def test_a_package_inside_somebody_elses_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "theirs.txt").write_text("1\n")
    (tmp_path / ".gitignore").write_text("site-packages\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") == {}


def test_no_checkout_means_no_git_tags(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}


def test_tags_name_the_seed_data_versions_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "eagle3_lab", "fit", "a b.yaml"])
    tags = provenance(seed=7, data_hash="sha256:abc")
    assert (tags["seed"], tags["data"]) == ("7", "sha256:abc")
    assert tags["version.torch"] == torch.__version__
    assert tags["command"] == "python -m eagle3_lab fit 'a b.yaml'"
    assert {"machine.platform", "machine.cpu", "version.lightning", "version.transformers"} <= tags.keys()
    assert f"{torch.get_num_threads()} threads" in tags["machine.cpu"]
    assert ("machine.gpu" in machine()) == torch.cuda.is_available()
    assert all(value and len(value) < 5000 for value in tags.values())
