"""Runs in MLflow: the only module that imports it.

Everything lands in one folder, by default ``mlruns/``:

    mlflow.db            parameters, metrics, tags (SQLite)
    artifacts/NAME/      files of the runs of experiment NAME

MLflow keeps artifact locations as absolute paths, and neither a relative path nor its ``mlflow-artifacts:`` scheme
helps: the first is made absolute when the experiment is created, the second can be written and read through a running
server only. So each experiment carries its place inside the folder as a tag, and whoever opens a folder that was
moved has its locations rewritten first: :func:`relocate`.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from eagle3_lab.errors import UserError
from eagle3_lab.parameters import flatten

if TYPE_CHECKING:  # imported where they are used: configuration errors and --help need neither
    import matplotlib.figure
    import mlflow.tracking

Status = Literal["FINISHED", "FAILED", "KILLED"]

PLACE_TAG = "eagle3_lab.artifacts"
LONGEST_PARAM = 500
PER_BATCH = 100  # MLflow takes at most this many parameters in a batch


@dataclass(frozen=True)
class Tracking:
    """Where runs are kept and what they are called.

    Args:
        folder: the folder of the store; made if missing.
        experiment: the MLflow experiment, one for each question.
        run_name: shown in the run list; by default MLflow makes one up.
    """

    folder: Path = Path("mlruns")
    experiment: str = "eagle3_lab"
    run_name: str | None = None


class Run:
    """One MLflow run. As a context manager it ends FINISHED, or FAILED, or KILLED by the user or by a signal."""

    def __init__(self, client: mlflow.tracking.MlflowClient, folder: Path, run_id: str) -> None:
        info = client.get_run(run_id).info
        self._client = client
        self.folder = folder
        self.id: str = info.run_id
        self.name = str(info.run_name)
        self.experiment_id: str = info.experiment_id

    @property
    def page(self) -> str:
        """The run's page below the UI's address."""
        return f"#/experiments/{self.experiment_id}/runs/{self.id}"

    def log_params(self, tree: Mapping[str, object]) -> None:
        """Log a nested configuration under the keys of :func:`eagle3_lab.parameters.flatten`. A value of more than 500
        characters is cut visibly and kept whole as artifact ``params/KEY.txt``.

        Raises: UserError where a continued run already holds another value for a key.
        """
        from mlflow.entities import Param

        known = self._client.get_run(self.id).data.params
        fresh = []
        for key, value in flatten(tree).items():
            short = value
            if len(value) > LONGEST_PARAM:
                file = f"params/{key}.txt"
                short = f"{value[: LONGEST_PARAM - len(file) - 20]} ... (whole: {file})"
                self.log_text(value, file)
            if known.get(key, short) != short:
                raise UserError(
                    f"{key}: run {self.id} was started with {known[key]!r}, now it is {short!r}; "
                    "continue it as it was started, or start a new run"
                )
            if key not in known:
                fresh.append(Param(key, short))
        for start in range(0, len(fresh), PER_BATCH):
            self._client.log_batch(self.id, params=fresh[start : start + PER_BATCH])

    def log_metrics(self, values: Mapping[str, int | float], step: int = 0) -> None:
        """Log scalars of one step in one call. Slashes in names group charts: ``val/tau_walked``. NaN is kept."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(key, float(v), now, step) for key, v in values.items()])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags: searchable, and shown beside the parameters."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.id, tags=[RunTag(key, value) for key, value in tags.items()])

    def describe(self, markdown: str) -> None:
        """Set the text at the top of the run's page, e.g. the closing table."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_text(self, text: str, path: str) -> None:
        """Keep a text as artifact ``path``."""
        self._client.log_text(self.id, text, path)

    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts, below ``folder``."""
        self._client.log_artifact(self.id, str(file), folder)

    def log_figure(self, figure: matplotlib.figure.Figure, path: str) -> None:
        """Keep a matplotlib figure as artifact ``path`` (.png, .svg or .pdf)."""
        self._client.log_figure(self.id, figure, path)

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Run:
        """Start a run of the same experiment that the UI nests below this one."""
        parent = {"mlflow.parentRunId": self.id}
        made = self._client.create_run(self.experiment_id, run_name=name, tags=dict(tags or {}) | parent)
        return Run(self._client, self.folder, made.info.run_id)

    def finish(self, status: Status = "FINISHED") -> None:
        """End the run. A process that is killed outright leaves it RUNNING, until it is continued."""
        self._client.set_terminated(self.id, status)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")


def open_run(tracking: Tracking, run_id: str | None = None, tags: Mapping[str, str] | None = None) -> Run:
    """Start a run, or continue run ``run_id`` of this store (after a kill): its parameters, metrics and files stay.

    Raises: UserError where the store cannot be written, the run is not in it, or the experiment was deleted.
    """
    from mlflow.exceptions import MlflowException

    client, folder = _open_store(tracking.folder)
    if run_id is None:
        made = client.create_run(
            _experiment(client, folder, tracking.experiment), run_name=tracking.run_name, tags=dict(tags or {})
        )
        return Run(client, folder, made.info.run_id)
    try:
        run = Run(client, folder, run_id)
    except MlflowException:
        raise UserError(f"{tracking.folder}: no run {run_id!r} in this store") from None
    client.update_run(run_id, status="RUNNING")
    run.set_tags(tags or {})
    return run


# ---------------------------------------------------------------------------------------------------------- store


def _open_store(folder: Path) -> tuple[mlflow.tracking.MlflowClient, Path]:
    """A client of the store in ``folder``, which is made if missing and relocated if it was moved."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported, hence here
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    for talker in ("mlflow.store.db.utils", "alembic"):  # a page about creating tables
        logging.getLogger(talker).setLevel(logging.WARNING)
    where = folder.resolve()
    try:
        (where / "artifacts").mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(where / "mlflow.db", timeout=30)) as database:
            database.execute("BEGIN IMMEDIATE")  # taken and given back: can it be written at all?
            database.rollback()
        relocate(where)
        uri = store_uri(where)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # makes or checks the tables
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"tracking.folder: {folder} cannot be written ({error}); name a folder that can") from None
    except MlflowException as error:
        raise UserError(f"tracking.folder: {folder}/mlflow.db cannot be opened ({_first_line(error)})") from None
    return client, where


def _experiment(client: mlflow.tracking.MlflowClient, folder: Path, name: str) -> str:
    """The id of an experiment, made if missing with its place inside the folder as a tag."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = "artifacts/" + re.sub(r"[^\w.-]+", "_", name)
        (folder / place).mkdir(parents=True, exist_ok=True)
        try:
            return client.create_experiment(name, (folder / place).as_uri(), tags={PLACE_TAG: place})
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: {name!r} was deleted in {folder}; restore it in the UI, or choose another name"
        )
    return found.experiment_id


def store_uri(folder: Path) -> str:
    """MLflow's tracking URI of a store, for notebooks: ``MlflowClient(store_uri(Path("mlruns")))``."""
    return f"sqlite:///{folder.resolve() / 'mlflow.db'}"


def relocate(folder: Path) -> int:
    """Make a moved folder whole again: rewrite the artifact locations of our experiments, and of their runs, that do
    not point into ``folder``. One transaction; returns how many experiments it changed (0 where nothing moved)."""
    changed = 0
    with closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as database, database:
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


def _recorded(database: sqlite3.Connection) -> Iterator[tuple[int, str, str]]:
    """Id, recorded location and place inside the folder of each of our experiments; none in a store not made yet."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiment_tags'").fetchone():
        yield from database.execute(
            "SELECT e.experiment_id, e.artifact_location, t.value FROM experiments e"
            " JOIN experiment_tags t ON t.experiment_id = e.experiment_id WHERE t.key = ?",
            (PLACE_TAG,),
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


# ------------------------------------------------------------------------------------------------------------- UI


def ui_command(folder: Path, port: int = 5000) -> list[str]:
    """The command that shows a store in the browser, at ``http://127.0.0.1:PORT``."""
    store = [
        "--backend-store-uri",
        store_uri(folder),
        "--default-artifact-root",
        (folder.resolve() / "artifacts").as_uri(),
    ]
    return ["mlflow", "ui", *store, "--port", str(port), "--workers", "1"]


def serve_ui(folder: Path, port: int = 5000) -> int:
    """Serve a store's UI until interrupted; returns the server's exit status.

    Raises: UserError where there is no store in ``folder``.
    """
    if not (folder / "mlflow.db").is_file():
        raise UserError(f"{folder}: no runs here yet (no mlflow.db)")
    relocate(folder)
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no jobs to wait for
    return subprocess.run(
        (sys.executable, "-m", *ui_command(folder, port)), env=os.environ | quiet, check=False
    ).returncode
