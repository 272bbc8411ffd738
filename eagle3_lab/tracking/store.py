"""The folder in which runs are kept: what survives a move, and how to look at it.

MLflow keeps artifact locations as absolute paths, and neither a relative path nor its ``mlflow-artifacts:`` scheme
helps: the first is made absolute when the experiment is created, the second can be written and read through a running
server only. So each of our experiments carries its place inside the folder as a tag, and whoever opens a folder that
was moved has its locations rewritten first: :func:`relocate`. Tables and columns are those of MLflow 3.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3_lab.errors import UserError

PLACE_TAG = "eagle3_lab.artifacts"
ALIVE = ".alive"


def store_uri(folder: Path) -> str:
    """MLflow's tracking URI of a store, for notebooks: ``MlflowClient(store_uri(Path("mlruns")))``."""
    return database_uri(folder.resolve() / "mlflow.db")


def database_uri(database: Path) -> str:
    """How MLflow calls a SQLite file."""
    return f"sqlite:///{database}"


def relocate(folder: Path) -> int:
    """Make a moved folder whole again: rewrite the artifact locations of our experiments, and of their runs, that do
    not point into ``folder``. Experiments without our tag are left alone. One transaction; returns how many experiments
    it changed (0 where nothing moved)."""
    changed = 0
    with _database(folder) as database:
        for experiment, old, place in list(_recorded(database)):
            new = (folder.resolve() / place).as_uri()
            if new == old:
                continue
            database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, experiment))
            database.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?)"
                " WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, experiment, len(old) + 1, old + "/"),
            )
            changed += 1
    return changed


def require_writable(folder: Path) -> None:
    """Take the database's lock and give it back: can it be written at all? Raises sqlite3.Error or OSError."""
    with closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.rollback()


def alive(folder: Path, run_id: str) -> FileLock:
    """The lock, not yet taken, that a process holds while it writes a run; the system lets go of it when the process
    ends, however it ends."""
    return FileLock(folder / f".{run_id}{ALIVE}")


def end_abandoned(folder: Path, but: str | None = None) -> None:
    """Set runs FAILED, and those below them, that a process left RUNNING when it was killed outright, or could not end
    on a disk that was full. ``but``: one that is to be continued."""
    for mark in folder.glob(f".*{ALIVE}"):
        run_id = mark.name.removeprefix(".").removesuffix(ALIVE)
        if run_id == but:
            continue
        try:
            with alive(folder, run_id).acquire(timeout=0), _database(folder) as database:
                database.execute(
                    "UPDATE runs SET status = 'FAILED', end_time = ? WHERE status = 'RUNNING' AND (run_uuid = ? OR "
                    "run_uuid IN (SELECT run_uuid FROM tags WHERE key = 'mlflow.parentRunId' AND value = ?))",
                    (int(time.time() * 1000), run_id, run_id),
                )
            mark.unlink(missing_ok=True)
        except (Timeout, OSError):  # it is at work, or its folder takes no files
            continue


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    """The store's database, in one transaction."""
    with closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as database, database:
        yield database


def _recorded(database: sqlite3.Connection) -> Iterator[tuple[int, str, str]]:
    """Id, recorded location and place inside the folder of each of our experiments; none in a store not made yet."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiment_tags'").fetchone():
        yield from database.execute(
            "SELECT e.experiment_id, e.artifact_location, t.value FROM experiments e"
            " JOIN experiment_tags t ON t.experiment_id = e.experiment_id WHERE t.key = ?",
            (PLACE_TAG,),
        )


def ui_command(folder: Path, port: int = 5000) -> list[str]:
    """The command that shows a store in the browser, at ``http://127.0.0.1:PORT``."""
    store = [
        "--backend-store-uri",
        store_uri(folder),
        "--default-artifact-root",
        (folder.resolve() / "artifacts").as_uri(),
    ]
    return [*_mlflow(), "ui", *store, "--port", str(port), "--workers", "1"]


def _mlflow() -> list[str]:
    """How to call mlflow as it stands beside this Python, whether or not its environment is active."""
    beside = Path(sys.executable).with_name("mlflow")
    found = shutil.which("mlflow")
    if found is not None and Path(found).resolve() == beside.resolve():
        return ["mlflow"]
    return [sys.executable, "-m", "mlflow"]


def serve_ui(folder: Path, port: int = 5000) -> int:
    """Serve a store's UI until interrupted; returns the server's exit status.

    Raises: UserError where there is no store in ``folder``, or one that cannot be written.
    """
    if not (folder / "mlflow.db").is_file():
        raise UserError(f"{folder}: no runs here yet (no mlflow.db)")
    try:
        require_writable(folder)
        relocate(folder)
        end_abandoned(folder)
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"{folder}: cannot be written ({error}), and MLflow's pages need a store that can; copy the folder, and "
            "name the copy with --tracking.folder"
        ) from None
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no jobs to wait for
    return subprocess.run(ui_command(folder, port), env=os.environ | quiet, check=False).returncode
