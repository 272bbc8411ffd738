"""The notebooks: their cells run in order, as a reader runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_lab.evaluation.results import ClosingTable

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[str]:
    """The code of a notebook, cell by cell."""
    found = json.loads((FOLDER / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_what_it_printed(name: str) -> None:
    found = json.loads((FOLDER / name).read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in found if cell["cell_type"] == "code")


@pytest.mark.slow
def test_a_proposer_written_in_a_notebook_is_measured_beside_the_packages_own(
    embedded: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(cells("new_proposer.ipynb")):
        exec(compile(text, f"cell {number}", "exec"), names)  # noqa: S102
    table = names["table"]
    assert isinstance(table, ClosingTable)
    rows = {row.name: row for row in table.methods if row.dtype == "float32"}
    assert set(rows) == {"vanilla", "pld", "follow"}
    assert len({row.tokens for row in rows.values()}) == 1, "all say what plain decoding says"
    assert rows["follow"].tau.value > 1, "some of its drafts are right"
