"""The small ablation, nothing run yet or with all its cells done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ablation_toys import Toy, make_toy
from tiny import TinyLab


@pytest.fixture
def toy(tiny: TinyLab, tmp_path: Path) -> Toy:
    return make_toy(tiny, tmp_path)


@pytest.fixture(scope="session")
def done(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """All cells run, with two seeds. Tests may add runs and files to it, and change none."""
    folder = tmp_path_factory.mktemp("done")
    toy = make_toy(tiny, folder)
    toy.change("figures:", "seeds: [0, 1]\nfigures:")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_LAB_CACHE", str(folder / "cache"))
        for number in range(1, 5):
            ran = toy.run("ablate", "--cell", str(number))
            assert ran.code == 0, ran.err
    return toy


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    yield
