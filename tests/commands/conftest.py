"""The verbs on the tiny target: one experiment of seconds, fresh or run to its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Bench, Ran, make_bench
from tiny import TinyLab


@pytest.fixture
def bench(tiny: TinyLab, tmp_path: Path) -> Bench:
    """The experiment, nothing run yet."""
    return make_bench(tiny, tmp_path)


@pytest.fixture(scope="session")
def finished(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Ran]:
    """The experiment run to its end once, and what that said. Tests may add runs to its store, and change no file."""
    done = make_bench(tiny, tmp_path_factory.mktemp("finished"))
    return done, done.run("fit", "--json", str(done.yaml.with_name("table.json")))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    yield
