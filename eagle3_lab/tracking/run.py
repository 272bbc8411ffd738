"""Runs in MLflow: the only module that imports it.

Everything lands in one folder, by default ``mlruns/``:

    mlflow.db            parameters, metrics, tags (SQLite)
    artifacts/NAME/      files of the runs of experiment NAME

The folder may be moved: see :mod:`eagle3_lab.tracking.store`. mlflow is imported with the first run: that takes
seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock, Timeout

from eagle3_lab.errors import UserError
from eagle3_lab.system.files import local_path
from eagle3_lab.tracking.params import flatten
from eagle3_lab.tracking.store import (
    PLACE_TAG,
    alive,
    database_uri,
    end_abandoned,
    relocate,
    require_writable,
    serve_ui,
    store_uri,
    ui_command,
)

if not TYPE_CHECKING:
    pass  # jsonargparse executes an `if TYPE_CHECKING` block to read the signatures of a module
else:  # imported where they are used: configuration errors and --help need neither
    import matplotlib.figure
    import mlflow.tracking

__all__ = ["Run", "Status", "Tracking", "open_run", "serve_ui", "store_uri", "ui_command"]

Status = Literal["FINISHED", "FAILED", "KILLED"]

LONGEST_PARAM = 500
LONGEST_TAG = 5000
LONGEST_NAME = 120  # it is a folder's name as well
KINDS = {"mlflow.experimentKind": "custom_model_development"}  # else MLflow 3 shows it as one of prompts and traces
VIEW_TAG = "mlflow.sharedViewState."
PER_BATCH = 100  # MLflow takes at most this many parameters in a batch
METRICS_PER_BATCH = 1000


@dataclass(frozen=True)
class Tracking:
    """Where runs are kept and what they are called.

    Args:
        folder: the folder of the store, ``~`` resolved; made if missing.
        experiment: the MLflow experiment, one for each question.
        run_name: shown in the run list; by default MLflow makes one up.
    """

    folder: Path = Path("mlruns")
    experiment: str = "eagle3_lab"
    run_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.experiment.encode()) <= LONGEST_NAME:
            raise ValueError(f"tracking.experiment must have 1 to {LONGEST_NAME} bytes, got {self.experiment[:40]!r}")
        try:
            object.__setattr__(self, "folder", local_path(str(self.folder)))
        except UserError as error:
            raise UserError(f"tracking.folder: {error}") from None


class Run:
    """One MLflow run. As a context manager it ends FINISHED, or FAILED, or KILLED by the user or by a signal.

    Raises: UserError, from every method that writes, where the store cannot be written any more.
    """

    def __init__(self, client: mlflow.tracking.MlflowClient, folder: Path, run_id: str) -> None:
        info = client.get_run(run_id).info
        self._client = client
        self.folder = folder
        self.id: str = info.run_id
        self._alive: FileLock | None = None
        self.name = str(info.run_name)
        self.experiment_id: str = info.experiment_id

    @property
    def page(self) -> str:
        """The address of the run's page, where the UI is served as :func:`ui_command` says."""
        return f"http://127.0.0.1:5000/#/experiments/{self.experiment_id}/runs/{self.id}"

    def log_params(self, tree: Mapping[str, object]) -> None:
        """Log a nested configuration under the keys of :func:`eagle3_lab.tracking.params.flatten`. A value of more than
        500 characters is cut visibly and kept whole as artifact ``params/KEY.txt``.

        A continued run keeps the values that it began with, since MLflow's parameters never change; other values now
        are its tag ``changed``. (Which run is continued is decided by a key of what its results depend on: the others
        may change.)
        """
        from mlflow.entities import Param

        known = self._client.get_run(self.id).data.params
        fresh, changed = [], []
        for key, value in flatten(tree).items():
            short = value
            if len(value) > LONGEST_PARAM:
                file = f"params/{key}.txt"
                short = f"{value[: LONGEST_PARAM - len(file) - 20]} ... (whole: {file})"
                self.log_text(value, file)
            if known.get(key, short) != short:
                changed.append(f"{key}: {short}")
            if key not in known:
                fresh.append(Param(key, short))
        with self._writing():
            for start in range(0, len(fresh), PER_BATCH):
                self._client.log_batch(self.id, params=fresh[start : start + PER_BATCH])
        if changed:
            self.set_tags({"changed": "; ".join(changed)[:LONGEST_TAG]})

    def log_metrics(self, values: Mapping[str, int | float], step: int = 0) -> None:
        """Log scalars of one step in one call (a thousand a call). Slashes in names group charts: ``val/tau_walked``.
        NaN is kept."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, float(value), now, step) for key, value in values.items()]
        with self._writing():
            for start in range(0, max(len(metrics), 1), METRICS_PER_BATCH):
                self._client.log_batch(self.id, metrics=metrics[start : start + METRICS_PER_BATCH])

    def log_results(self, values: Mapping[str, int | float]) -> None:
        """Log scalars without a step. A value that the run has already, as after a kill, is not logged again."""
        logged = self._client.get_run(self.id).data.metrics
        self.log_metrics({key: value for key, value in values.items() if not _same(logged.get(key), value)})

    def steps_of(self, key: str) -> set[int]:
        """The steps at which a metric was logged."""
        return {point.step for point in self._client.get_metric_history(self.id, key)}

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags: searchable, and shown beside the parameters."""
        from mlflow.entities import RunTag

        with self._writing():
            self._client.log_batch(self.id, tags=[RunTag(key, value) for key, value in tags.items()])

    def describe(self, markdown: str) -> None:
        """Set the text at the top of the run's page, e.g. the closing table."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_text(self, text: str, path: str) -> None:
        """Keep a text as artifact ``path``."""
        with self._writing():
            self._client.log_text(self.id, text, path)

    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts, below ``folder``."""
        with self._writing():
            self._client.log_artifact(self.id, str(file), folder)

    def log_figure(self, figure: matplotlib.figure.Figure, path: str) -> None:
        """Keep a matplotlib figure as artifact ``path`` (.png, .svg or .pdf)."""
        with self._writing():
            self._client.log_figure(self.id, figure, path)

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Run:
        """Start a run of the same experiment that the UI nests below this one."""
        parent = {"mlflow.parentRunId": self.id}
        made = self._client.create_run(self.experiment_id, run_name=name, tags=dict(tags or {}) | parent)
        return Run(self._client, self.folder, made.info.run_id)

    def continued_child(
        self, name: str, tags: Mapping[str, str] | None = None, known_by: Mapping[str, str] | None = None
    ) -> Run:
        """The run of that name, and with the tags ``known_by``, that another process already nested below this one, or
        a new one with ``tags`` and ``known_by``."""
        below = f"tags.`mlflow.parentRunId` = '{self.id}'"
        for found in self._client.search_runs([self.experiment_id], below):
            if found.info.run_name == name and (known_by or {}).items() <= found.data.tags.items():
                self._client.update_run(found.info.run_id, status="RUNNING")
                return Run(self._client, self.folder, found.info.run_id)
        return self.child(name, {**(tags or {}), **(known_by or {})})

    def share_view(self, key: str, state: Mapping[str, object]) -> str:
        """Keep a view of this run's experiment (filter, order, columns) under ``key`` and return the address that opens
        it, where the UI is served as :func:`ui_command` says. It is what the UI's own button "Share" makes."""
        with self._writing():
            self._client.set_experiment_tag(self.experiment_id, f"{VIEW_TAG}{key}", json.dumps(state))
        return f"http://127.0.0.1:5000/#/experiments/{self.experiment_id}/runs?viewStateShareKey={key}"

    def tags(self) -> dict[str, str]:
        """The run's tags as they stand in the store."""
        return dict(self._client.get_run(self.id).data.tags)

    def values(self, metric: str) -> list[float]:
        """All values of a metric in the order of their steps; of a step that was logged twice the later one."""
        points = self._client.get_metric_history(self.id, metric)
        return list({one.step: one.value for one in sorted(points, key=lambda one: (one.step, one.timestamp))}.values())

    def hold(self) -> None:
        """Show other processes that this one is at work on the run, until `finish`. A process that is killed outright
        leaves it RUNNING, until it is continued, or the store is opened again: then it is FAILED."""
        lock = alive(self.folder, self.id)
        with suppress(Timeout, OSError):  # held by another Run of this process; or a disk that is full
            lock.acquire(timeout=0)
            self._alive = lock

    def finish(self, status: Status = "FINISHED") -> None:
        """End the run. Where that cannot be written, it is FAILED once the store is opened again."""
        lock, self._alive = self._alive, None
        try:
            with self._writing():
                self._client.set_terminated(self.id, status)
            if lock is not None:
                Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            if lock is not None:
                lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A store that cannot be written any more, as on a disk that filled up, costs the user one line."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, OSError) as error:
            raise UserError(
                f"{self.folder}: run {self.id} cannot be written ({_reason(error)}); make room and run again"
            ) from None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")


def _same(logged: float | None, value: float) -> bool:
    return logged is not None and (logged == value or (math.isnan(logged) and math.isnan(value)))


def _reason(error: BaseException) -> str:
    """Why a store failed, in the words of what failed first: SQLite's or the system's, not those of the layers between,
    which quote statements."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, sqlite3.Error):
            return str(at)
        if isinstance(at, OSError) and at.strerror:
            return at.strerror
        at = at.__cause__ or at.__context__
    return str(error).splitlines()[0]


def open_run(tracking: Tracking, run_id: str | None = None, tags: Mapping[str, str] | None = None) -> Run:
    """Start a run, or continue run ``run_id`` of this store (after a kill): its parameters, metrics and files stay.

    Raises: UserError where the store cannot be written, the run is not in it, or the experiment was deleted.
    """
    from mlflow.exceptions import MlflowException

    client, folder = _open_store(tracking.folder, run_id)
    if run_id is None:
        made = client.create_run(
            _experiment(client, folder, tracking.experiment), run_name=tracking.run_name, tags=dict(tags or {})
        )
        run = Run(client, folder, made.info.run_id)
        run.hold()
        return run
    try:
        run = Run(client, folder, run_id)
        client.update_run(run_id, status="RUNNING")  # refused for a run that was deleted in the UI
    except MlflowException:
        raise UserError(f"{tracking.folder}: no run {run_id!r} in this store") from None
    run.hold()
    run.set_tags(tags or {})
    return run


def find_run(tracking: Tracking, tags: Mapping[str, str]) -> str | None:
    """The id of the newest run of an experiment that has these tags; None where there is none. Raises: as
    `open_run`."""
    client, folder = _open_store(tracking.folder)
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = client.search_runs([_experiment(client, folder, tracking.experiment)], wanted, max_results=1)
    return found[0].info.run_id if found else None


def run_files(folder: Path, run_id: str) -> Path:
    """Return the folder of the files that a run of the store in ``folder`` logged.

    Raises: UserError where there is no such store or run.
    """
    from mlflow.exceptions import MlflowException

    if not (folder / "mlflow.db").is_file():
        raise UserError(f"{folder}: no runs here yet (no mlflow.db)")
    client, _ = _open_store(folder)
    try:
        return Path(url2pathname(urlsplit(str(client.get_run(run_id).info.artifact_uri)).path))
    except MlflowException:
        raise UserError(f"{folder}: no run {run_id!r} in this store") from None


# ---------------------------------------------------------------------------------------------------------- store


def _open_store(folder: Path, run_id: str | None = None) -> tuple[mlflow.tracking.MlflowClient, Path]:
    """A client of the store in ``folder``, which is made if missing and relocated if it was moved; runs that were
    abandoned there are ended, but ``run_id``, which is to be continued."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported, hence here
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # A page about creating tables from both; from the first also a traceback of every failure, which it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    where = folder.resolve()
    try:
        (where / "artifacts").mkdir(parents=True, exist_ok=True)
        if not (where / "mlflow.db").exists():
            _make_store(where)
        require_writable(where)
        relocate(where)
        end_abandoned(where, but=run_id)
        return _client(where / "mlflow.db"), where
    except (OSError, sqlite3.Error) as error:
        reason = f"tracking.folder: {folder} cannot be written ({error})"
        raise UserError(f"{reason}; name a folder that can be written") from None
    except (MlflowException, SQLAlchemyError) as error:  # the second from a disk that is full
        reason, advice = _reason(error), "make room, or name another folder"
        if versions := re.search(r"schema \(found version (\w+), but expected (\w+)\)", reason):
            reason = f"its schema is {versions[1]}, this MLflow's {versions[2]}"
            advice = "use the MLflow that wrote it, upgrade a copy with `mlflow db upgrade`, or name another folder"
        raise UserError(f"tracking.folder: {folder}/mlflow.db cannot be opened ({reason}); {advice}") from None


def _make_store(folder: Path) -> None:
    """Make the database aside and put it in place whole. MLflow's own making is a hundred migrations: a second process
    that comes in between breaks on them, and a killed one leaves a database that nobody can open."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as aside:
        made, whole = Path(aside) / "made.db", Path(aside) / "whole.db"
        _client(made)
        shutil.copyfile(made, whole)  # MLflow keeps a connection to the first
        with suppress(FileExistsError):  # another process was faster: its store is as good
            os.link(whole, folder / "mlflow.db")


def _client(database: Path) -> mlflow.tracking.MlflowClient:
    """A client, which makes or checks the tables. Always with both URIs: by default MLflow looks into the working
    folder."""
    from mlflow.tracking import MlflowClient

    uri = database_uri(database)
    return MlflowClient(uri, uri)


def _experiment(client: mlflow.tracking.MlflowClient, folder: Path, name: str) -> str:
    """The id of an experiment, made if missing with its place inside the folder as a tag."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = "artifacts/" + re.sub(r"[^\w.-]+", "_", name)
        (folder / place).mkdir(parents=True, exist_ok=True)
        try:
            return client.create_experiment(name, (folder / place).as_uri(), tags=KINDS | {PLACE_TAG: place})
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: {name!r} was deleted in {folder}; restore it in the UI, or choose another name"
        )
    return found.experiment_id
