"""Runs in a real MLflow store: what is kept, what survives a kill and a move, and what a wrong folder says."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from full_disk import files_of_at_most

from eagle3_lab.errors import UserError
from eagle3_lab.tracking.run import Run, Status, Tracking, open_run
from eagle3_lab.tracking.store import relocate, serve_ui, store_uri, ui_command

if TYPE_CHECKING:  # mlflow is imported by the first test that opens a store, after telemetry was turned off
    from mlflow.entities import Run as StoredRun
    from mlflow.tracking import MlflowClient


SAID = io.StringIO()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables made, once: making them takes seconds. What it says on the way is in SAID."""
    folder = tmp_path_factory.mktemp("store") / "mlruns"
    with contextlib.redirect_stderr(SAID):
        open_run(Tracking(folder, "first")).finish()
    return folder


@pytest.fixture
def tracking(empty_store: Path, tmp_path: Path) -> Tracking:
    """A private copy of that store, in a folder with a space in its name."""
    folder = tmp_path / "my runs" / "mlruns"
    shutil.copytree(empty_store, folder)
    return Tracking(folder, "depth/ablation", "seven steps")


def stored(run: Run) -> StoredRun:
    return client(run.folder).get_run(run.id)


def client(folder: Path) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store_uri(folder), store_uri(folder))


# -------------------------------------------------------------------------------------------------- what is kept


def test_making_a_store_says_nothing(empty_store: Path) -> None:
    assert (empty_store / "mlflow.db").is_file()
    assert SAID.getvalue() == ""


def test_a_run_keeps_its_parameters_metrics_tags_texts_and_status(tracking: Tracking, tmp_path: Path) -> None:
    with open_run(tracking, tags={"seed": "7"}) as run:
        run.log_params({"model": {"unroll": {"depth": 7}}, "seed": 7})
        run.log_metrics({"train/loss": 2.5, "val/tau_walked": 2}, step=10)
        run.log_metrics({"train/loss": 1.5, "val/tau_walked": float("nan")}, step=20)
        run.log_text("a: 1\n", "config.yaml")
        (tmp_path / "table.json").write_text("{}")
        run.log_artifact(tmp_path / "table.json", "report")
        run.describe("| method | tau |")
    kept = stored(run)
    assert (kept.info.run_name, kept.info.status) == ("seven steps", "FINISHED")
    assert kept.data.params == {"model.unroll.depth": "7", "seed": "7"}
    assert (kept.data.tags["seed"], kept.data.tags["mlflow.note.content"]) == ("7", "| method | tau |")
    history = client(run.folder).get_metric_history(run.id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(10, 2.5), (20, 1.5)]
    assert {f.path for f in client(run.folder).list_artifacts(run.id)} == {"config.yaml", "report"}
    assert run.page == f"http://127.0.0.1:5000/#/experiments/{kept.info.experiment_id}/runs/{run.id}"


def test_everything_lands_below_the_folder(tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with open_run(tracking) as run:
        run.log_text("x", "x.txt")
        run.log_metrics({"a": 1.0})
    assert list(elsewhere.iterdir()) == []
    assert len(list(tracking.folder.glob("artifacts/depth_ablation/*/artifacts/x.txt"))) == 1


def test_one_call_logs_all_metrics_of_a_step(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    run = open_run(tracking)
    calls: list[int] = []
    monkeypatch.setattr(MlflowClient, "log_batch", lambda self, run_id, metrics=(): calls.append(len(metrics)))
    run.log_metrics({f"train/step_{s}/accuracy": 0.5 for s in range(7)}, step=3)
    assert calls == [7]


def test_a_long_parameter_is_cut_visibly_and_kept_whole(tracking: Tracking) -> None:
    run = open_run(tracking)
    run.log_params({"prompts": "p" * 700, **{f"k{i}": i for i in range(150)}})
    params = stored(run).data.params
    assert len(params) == 151
    assert params["prompts"].endswith("... (whole: params/prompts.txt)") and len(params["prompts"]) <= 500
    path = client(run.folder).download_artifacts(run.id, "params/prompts.txt")
    assert Path(path).read_text() == "p" * 700


def test_a_figure_is_kept(tracking: Tracking) -> None:
    from matplotlib.figure import Figure

    run = open_run(tracking)
    run.log_figure(Figure(figsize=(1, 1)), "plots/tau.png")
    assert [f.path for f in client(run.folder).list_artifacts(run.id, "plots")] == ["plots/tau.png"]


def test_children_hang_below_their_parent(tracking: Tracking) -> None:
    parent = open_run(tracking)
    ids = {parent.child(name, {"cell": name}).id for name in ("one", "three")}
    found = client(parent.folder).search_runs([parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.id}'")
    assert {r.info.run_id for r in found} == ids
    assert {r.data.tags["cell"] for r in found} == {"one", "three"}


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")]
)
def test_a_run_that_breaks_says_so(tracking: Tracking, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), open_run(tracking) as run:
        raise error
    assert stored(run).info.status == status


# ------------------------------------------------------------------------------------------- after a kill, a move


def another_process(statements: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run statements that may use ``sys.argv[1:]``, as another session of the same person would."""
    imports = (
        "import os, signal, sys; from pathlib import Path; from eagle3_lab.tracking.run import Tracking, open_run\n"
    )
    command = [sys.executable, "-c", imports + textwrap.dedent(statements), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def continue_run(tracking: Tracking, run_id: str) -> None:
    """Continue a run that left ``lr`` and a loss of step 1, and look at what it holds then."""
    with open_run(tracking, run_id, tags={"resumed": "1"}) as run:
        assert stored(run).info.status == "RUNNING"
        run.log_params({"lr": 0.1, "late": None})
        run.log_metrics({"train/loss": 2.0}, 2)
    kept = stored(run)
    assert (kept.info.run_id, kept.info.status, kept.data.tags["resumed"]) == (run_id, "FINISHED", "1")
    assert kept.data.params == {"lr": "0.1", "late": "null"}
    assert [m.step for m in client(run.folder).get_metric_history(run_id, "train/loss")] == [1, 2]


@pytest.mark.parametrize("end", [None, "FAILED"])
def test_an_ended_or_abandoned_run_is_continued_with_all_it_had(tracking: Tracking, end: Status | None) -> None:
    first = open_run(tracking)
    first.log_params({"lr": 0.1})
    first.log_metrics({"train/loss": 3.0}, 1)
    if end:
        first.finish(end)
    continue_run(tracking, first.id)


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_can_be_continued(tracking: Tracking) -> None:
    died = another_process(
        """
        run = open_run(Tracking(Path(sys.argv[1]), "x"))
        run.log_params({"lr": 0.1})
        run.log_metrics({"train/loss": 3.0}, 1)
        print(run.id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tracking.folder,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    continue_run(tracking, died.stdout.strip())


@pytest.mark.slow
def test_processes_that_meet_in_a_new_folder_all_log_into_one_store(tmp_path: Path) -> None:
    open_and_log = """
        with open_run(Tracking(Path(sys.argv[1]))) as run:
            for step in range(20):
                run.log_metrics({"train/loss": 1.0}, step)
        """
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda _: another_process(open_and_log, tmp_path / "mlruns"), range(3)))
    assert [p.returncode for p in ended] == [0, 0, 0], ended[-1].stderr
    runs = client(tmp_path / "mlruns").search_runs(["1"])
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert {file.name for file in (tmp_path / "mlruns").iterdir()} == {"artifacts", "mlflow.db"}


def test_a_continued_run_keeps_the_parameters_it_began_with_and_says_which_are_others_now(tracking: Tracking) -> None:
    first = open_run(tracking)
    first.log_params({"model": {"budget_mib": 256}, "seed": 0})
    again = open_run(tracking, first.id)
    again.log_params({"model": {"budget_mib": 64}, "seed": 0})
    assert stored(again).data.params == {"model.budget_mib": "256", "seed": "0"}
    assert stored(again).data.tags["changed"] == "model.budget_mib: 64"


def test_a_moved_folder_still_works_for_old_and_new_files(tracking: Tracking, tmp_path: Path) -> None:
    with open_run(tracking) as run:
        run.log_text("before", "before.txt")
    moved = tmp_path / "moved here" / "runs"
    moved.parent.mkdir()
    tracking.folder.rename(moved)
    later = another_process(
        """
        from mlflow.tracking import MlflowClient
        from eagle3_lab.tracking.store import store_uri
        tracking, old = Tracking(Path(sys.argv[1]), sys.argv[2]), sys.argv[3]
        with open_run(tracking, old) as run:
            run.log_text("after", "after.txt")
        with open_run(tracking) as new:
            new.log_text("new", "new.txt")
        client = MlflowClient(store_uri(tracking.folder))
        print([file.path for run_id in (old, new.id) for file in client.list_artifacts(run_id)])
        """,
        moved,
        tracking.experiment,
        run.id,
    )
    assert later.returncode == 0, later.stderr
    assert later.stdout == "['after.txt', 'before.txt', 'new.txt']\n"
    files = moved.glob("artifacts/depth_ablation/*/artifacts/*.txt")
    assert sorted(file.read_text() for file in files) == ["after", "before", "new"]
    assert not tracking.folder.exists()
    assert relocate(moved) == 0


def test_relocating_leaves_experiments_of_others_alone(tracking: Tracking, tmp_path: Path) -> None:
    open_run(tracking)
    theirs = (tmp_path / "shared" / "artifacts" / "x").as_uri()
    client(tracking.folder).create_experiment("theirs", theirs)
    moved = tmp_path / "moved"
    tracking.folder.rename(moved)
    assert relocate(moved) == 2  # "first" of the fixture, and this test's
    places = {e.name: e.artifact_location for e in client(moved).search_experiments()}
    assert places["theirs"] == theirs
    assert places["depth/ablation"] == (moved / "artifacts" / "depth_ablation").resolve().as_uri()


@pytest.mark.slow
def test_the_ui_serves_the_files_of_a_moved_folder(tracking: Tracking, tmp_path: Path, free_port: int) -> None:
    with open_run(tracking) as run:
        run.log_text("hello", "note.txt")
    moved = tmp_path / "moved"
    tracking.folder.rename(moved)
    relocate(moved)
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(ui_command(moved, free_port), env=environment)
    try:
        base = f"http://127.0.0.1:{free_port}"
        wait_for(lambda: urllib.request.urlopen(f"{base}/health", timeout=5).read() == b"OK", seconds=300)
        url = f"{base}/get-artifact?path=note.txt&run_uuid={run.id}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.read() == b"hello"
    finally:
        server.terminate()
        server.wait(30)


def wait_for(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except OSError:
            pass
        if time.monotonic() > until:
            pytest.fail(f"nothing answered within {seconds} s")
        time.sleep(0.5)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------------- what goes wrong


def test_a_folder_that_is_a_file_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("")
    with pytest.raises(
        UserError, match=r"^tracking\.folder: .*mlruns cannot be written \(.*\); name a folder that can be written$"
    ):
        open_run(Tracking(tmp_path / "mlruns"))


def test_a_file_that_is_no_database_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to be read as one" * 40)
    message = r"^tracking\.folder: .* \(file is not a database\); name a folder that can be written$"
    with pytest.raises(UserError, match=message):
        open_run(Tracking(tmp_path))


def test_an_unknown_run_costs_one_line(tracking: Tracking) -> None:
    with pytest.raises(UserError, match=r"no run '0123' in this store$"):
        open_run(tracking, "0123")


def test_a_deleted_experiment_costs_one_line(tracking: Tracking) -> None:
    run = open_run(tracking)
    client(run.folder).delete_experiment(run.experiment_id)
    with pytest.raises(UserError, match=r"^tracking\.experiment: 'depth/ablation' was deleted in "):
        open_run(tracking)


@pytest.mark.parametrize("version", ["451aebb31d03", "ffffffffffff"], ids=["older", "newer"])
def test_a_store_of_another_mlflow_costs_one_line(tracking: Tracking, version: str) -> None:
    moved = tracking.folder.parent / "other"
    tracking.folder.rename(moved)
    database = sqlite3.connect(moved / "mlflow.db")
    with database:
        database.execute("UPDATE alembic_version SET version_num = ?", (version,))
    database.close()
    said = (
        rf"^tracking\.folder: .*other/mlflow\.db cannot be opened \(its schema is {version}, this MLflow's \w+\); use"
    )
    with pytest.raises(UserError, match=said):
        open_run(Tracking(moved))


def test_a_disk_that_is_full_costs_one_plain_line_and_the_run_is_failed_at_the_next_start(tracking: Tracking) -> None:
    run = open_run(tracking)
    child = run.child("one")
    database = tracking.folder / "mlflow.db"
    line = rf"^\S.*mlruns: run {run.id} cannot be written \([^()]+\); make room and run again$"
    with files_of_at_most(database.stat().st_size), pytest.raises(UserError, match=line) as told, run:
        run.log_metrics({f"some/long/name/of/a/metric/{i}": float(i) for i in range(5000)})
    assert not {"sqlite3", "SQL", "sqlalche", "Background"} & set(str(told.value).replace(".", " ").split())
    client(run.folder).update_run(run.id, status="RUNNING")  # as where there is no room for a status either
    mark = tracking.folder / f".{run.id}.alive"
    mark.touch()
    other = open_run(tracking)
    kept = [stored(one).info for one in (run, child, other)]
    assert [one.status for one in kept] == ["FAILED", "FAILED", "RUNNING"]
    assert kept[0].end_time is not None and not mark.exists()
    other.finish()
    assert not list(tracking.folder.glob(".*"))


@pytest.mark.slow
def test_a_run_whose_process_was_killed_is_failed_once_another_opens_the_store(tracking: Tracking) -> None:
    killed = another_process(
        "print(open_run(Tracking(Path(sys.argv[1]))).id, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        tracking.folder,
    )
    at_work = open_run(tracking)
    again = another_process("open_run(Tracking(Path(sys.argv[1]))).finish()", tracking.folder)
    assert again.returncode == 0, again.stderr
    assert client(tracking.folder).get_run(killed.stdout.strip()).info.status == "FAILED"
    assert stored(at_work).info.status == "RUNNING", "its process is alive"
    at_work.finish()


def test_a_ui_over_a_store_that_cannot_be_written_costs_one_line(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **more: connect(f"file:{path}?mode=ro", uri=True, **more))
    with pytest.raises(
        UserError, match=r"^\S.*mlruns: cannot be written \(attempt to write a readonly database\), and "
    ):
        serve_ui(tracking.folder)


def test_a_ui_without_a_store_costs_one_line_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no runs here yet"):
        serve_ui(tmp_path / "mlruns")
    assert not (tmp_path / "mlruns").exists()
