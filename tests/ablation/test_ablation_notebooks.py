"""The notebooks: their cells run in order on the tiny target, with the values of their first code cell replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ablation_toys import Toy
from tiny import TinyLab

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def run(name: str, **chosen: object) -> dict[str, Any]:
    """The names that a notebook leaves; ``chosen`` replaces what its first code cell chooses."""
    cells = json.loads((FOLDER / name).read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate("".join(one["source"]) for one in cells if one["cell_type"] == "code"):
        exec(compile(text, f"{name}, cell {number}", "exec"), names)  # noqa: S102
        if number == 0:
            assert chosen.keys() <= names.keys()
            names.update(chosen)
    return names


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_what_it_printed(name: str) -> None:
    cells = json.loads((FOLDER / name).read_text())["cells"]
    assert all(not one["outputs"] and one["execution_count"] is None for one in cells if one["cell_type"] == "code")


def test_a_head_is_trained_from_its_parts(tiny: TinyLab) -> None:
    sizes = {"draft_vocab": 64, "max_length": 96, "row_length": 128, "depth": 2}
    names = run("train_from_parts.ipynb", target_model=str(tiny.target), conversations=str(tiny.data), steps=8, **sizes)
    assert names["trainer"].global_step == 8
    assert names["after"].readings["step_0/accuracy"] > names["before"].readings["step_0/accuracy"]


def test_an_ablation_is_read_from_mlflow_and_drawn(done: Toy) -> None:
    names = run("load_an_ablation.ipynb", store=str(done.runs), ablation="depth")
    assert len(names["cells"]) == 4
    assert len(names["axes"].containers) == 4


def test_two_cells_are_compared_as_a_pair(done: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("compare_two_cells.ipynb", folder=str(done.folder), ours="deep-0", base="flat-0")
    out = capsys.readouterr().out
    assert "{'model.unroll.depth': ('1', '2')}" in out and "visited: " in out and "all: " in out
    assert len(names["gains"]) == names["a"].facts["held_out"]
