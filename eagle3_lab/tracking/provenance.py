"""Where a run came from: code, command, seed, data, versions, machine. Flat names, short values, ready as run tags."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "torchmetrics", "datasets", "numpy")


def provenance(seed: int, data_hash: str) -> dict[str, str]:
    """Tags of a run: ``git.*``, ``version.*``, ``machine.*``, ``seed``, ``data`` and ``command``, and those from which
    MLflow fills its own columns (``mlflow.*``). Without a checkout there are no ``git.*`` tags.

    Args:
        seed: the run's seed.
        data_hash: what identifies the data, e.g. its manifest's hash.
    """
    command = shlex.join(sys.orig_argv)
    tags = {"seed": str(seed), "data": data_hash, "command": command, "mlflow.source.name": "eagle3_lab"}
    tags |= {"mlflow.source.type": "LOCAL", "mlflow.user": _user()}
    return tags | _versions() | machine() | git_state(Path(__file__).parents[1])


def _versions() -> dict[str, str]:
    tags = {"version.python": platform.python_version()} | {f"version.{name}": version(name) for name in _PACKAGES}
    try:
        return tags | {"version.eagle3-lab": version("eagle3-lab")}
    except PackageNotFoundError:  # run from a checkout without installing it: git.commit says more
        return tags


def git_state(folder: Path) -> dict[str, str]:
    """``git.commit`` and ``git.dirty`` ("true" also for files that git does not know yet) of the checkout that tracks
    ``folder``; nothing where none does, e.g. for an installed package inside somebody else's checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or not _git(folder, "ls-files", "--", "."):
        return {}
    dirty = bool(_git(folder, "status", "--porcelain"))
    return {"git.commit": commit, "git.dirty": str(dirty).lower(), "mlflow.source.git.commit": commit}


def source_hash() -> str:
    """Identity of this package's code, file by file, committed or not."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine: nothing is known, which is what no tag says
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, str]:
    """``machine.platform``, ``machine.cpu`` with the threads torch uses, and ``machine.gpu`` where there is one."""
    tags = {"machine.platform": platform.platform()}
    tags["machine.cpu"] = f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        tags["machine.gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        tags["version.cuda"] = str(torch.version.cuda)
    return tags


def _cpu() -> str:
    listed = Path("/proc/cpuinfo")  # Linux names the model here, and platform.processor() does not
    if listed.is_file():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
