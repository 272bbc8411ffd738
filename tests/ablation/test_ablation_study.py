"""The study's own ablations: all can be read, their pages have what must be written before a run, and cells that are
the same in several folders are trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_lab.ablation.page import BEGIN, END
from eagle3_lab.ablation.plan import Ablation, read_ablation

FOLDER = Path(__file__).parents[2] / "ablations"
CELLS = {
    "families": 18,
    "data_scaling": 17,
    "ttt_depth": 5,
    "which_layers": 5,
    "draft_vocabulary": 3,
    "mask": 2,
    "lk_losses": 3,
    "families_llama31_8b": 18,
}


@pytest.fixture(scope="module")
def study() -> dict[str, Ablation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER.parent)  # where its data is named from
        return {name: read_ablation(FOLDER / name) for name in CELLS}


def test_every_folder_is_read_and_is_in_the_list(study: dict[str, Ablation]) -> None:
    assert {path.parent.name for path in FOLDER.glob("*/ablation.yaml")} == CELLS.keys()
    assert {name: len(one.cells) for name, one in study.items()} == CELLS
    listed = (FOLDER / "README.md").read_text()
    assert all(f"| `{name}` |" in listed for name in CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_a_page_has_markers_and_room_for_a_verdict(name: str) -> None:
    text = (FOLDER / name / "README.md").read_text()
    assert text.index(BEGIN) < text.index(END) < text.index("## Verdict")
    if name != "families_llama31_8b":
        assert "**Prediction.**" in text and "would refute it" in text


def test_the_same_cell_is_the_same_in_every_folder(study: dict[str, Ablation]) -> None:
    keys = {(name, cell.title): cell.key for name, one in study.items() for cell in one.cells}
    eagle3 = keys["families", "eagle3-0"]
    for place in (
        ("data_scaling", "eagle3-x8-0"),
        ("ttt_depth", "depth_7-0"),
        ("which_layers", "three-0"),
        ("draft_vocabulary", "of_8192-0"),
        ("mask", "drafted-0"),
        ("lk_losses", "soft_ce-0"),
    ):
        assert keys[place] == eagle3, place
    for cell in ("eagle", "hass", "no_feature_loss"):
        assert keys["families", f"{cell}-0"] == keys["data_scaling", f"{cell}-x8-0"]
    assert len(set(keys.values())) == sum(CELLS.values()) - 9


def test_all_cells_of_the_study_are_trained_alike(study: dict[str, Ablation]) -> None:
    def part(cell: object, key: str) -> dict:
        given = cell.config.plain[key]  # type: ignore[attr-defined]
        return given.get("init_args", given)

    cells = [cell for name, one in study.items() if name != "families_llama31_8b" for cell in one.cells]
    assert len({(part(cell, "data")["path"], part(cell, "data")["row_length"]) for cell in cells}) == 1
    assert len({str(part(cell, "optimizer")) for cell in cells}) == 1
    steps = {part(cell, "trainer")["max_steps"] for cell in cells if cell.scale == 1 and cell.label == cell.name}
    assert len(steps) == 1, "but for smaller scales"
    assert all(cell.config.plain["evaluate"] is None and part(cell, "model")["compile"] for cell in cells)
