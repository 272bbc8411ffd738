"""What an ablation found, in its folder and in MLflow: comparisons, table, figures, and the page around them."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ablation_toys import Toy
from mlflow.tracking import MlflowClient

from eagle3_lab.ablation import compare, figures, page, results, runs
from eagle3_lab.ablation.figure_names import FIGURES
from eagle3_lab.ablation.results import ALL, VISITED, Result
from eagle3_lab.errors import UserError
from eagle3_lab.tracking.run import store_uri


def made_up(cell: str, scale: int, seed: int, emitted: list[int], title: str = "") -> Result:
    """A result over as many conversations of ten rounds each; two drafts deep, of which the first is always right."""
    rows = {f"c{i}": [10, e, 10, e - 10, 10, 10, 10, 5, 10, 10, 10, 5] for i, e in enumerate(emitted)}
    facts = {"tokens": 1000 * scale, "training_seconds": 60.0, "target": "toy", "held_out": len(rows), "steps": 3}
    blank = Result(cell, scale, seed, "key", {"model.unroll.depth": "1"}, {}, {}, rows, facts)
    return dataclasses.replace(blank, values=results.values_of(blank))


def scaled(toy: Toy) -> tuple[compare.Ablation, dict[str, Result]]:
    """Deep and flat at three scales with two seeds: deep is better by 2 tokens a conversation, flat gains nothing."""
    toy.change(
        "figures: [tau, n_alpha]",
        "seeds: [0, 1]\nscales: [1, 2, 4]\nfigures: [tau, n_alpha, tau_by_data, n_alpha_by_data]",
    )
    toy.change("cells:", "against: flat\ncells:")
    ablation = toy.read()
    base = [11, 25, 14, 19, 12, 30, 17, 16]
    found = {}
    for cell in ablation.cells:
        gain = 2 * cell.scale if cell.name == "deep" else 0
        wobble = [(i * 7 + cell.seed) % 2 for i in range(len(base))] if cell.name == "flat" else [0] * len(base)
        found[cell.title] = made_up(
            cell.name, cell.scale, cell.seed, [b + gain + w for b, w in zip(base, wobble, strict=True)]
        )
    return ablation, found


def test_rows_are_means_over_seeds_and_comparisons_are_paired(toy: Toy) -> None:
    ablation, found = scaled(toy)
    rows = compare.rows(ablation, found)
    assert [row.label for row in rows] == ["deep-x1", "deep-x2", "deep-x4", "flat-x1", "flat-x2", "flat-x4"]
    deep = rows[0]
    assert deep.tau[VISITED].value == pytest.approx((144 + 16) / 80)
    assert deep.by_seed[VISITED] == pytest.approx((2.0, 2.0))
    assert deep.tau[ALL].value == pytest.approx(2.0), "1 + leading / whole is the same here"
    assert [one.value for one in deep.n_alpha[VISITED]] == [1.0, 0.5]
    made = compare.comparisons(ablation, rows)
    pairs = [(one.label, one.against) for one in made if one.reading == VISITED]
    assert pairs == [
        *((f"deep-x{s}", f"flat-x{s}") for s in (1, 2, 4)),
        ("deep-x2", "deep-x1"),
        ("deep-x4", "deep-x1"),
        ("flat-x2", "flat-x1"),
        ("flat-x4", "flat-x1"),
    ]
    by_pair = {(one.label, one.against): one for one in made if one.reading == VISITED}
    assert by_pair["deep-x4", "deep-x1"].difference.interval.value == pytest.approx(0.6)
    assert by_pair["deep-x4", "deep-x1"].shown
    flat = by_pair["flat-x4", "flat-x1"]
    assert not flat.shown and flat.words == "+0.000 [+0.000, +0.000], no difference shown"
    assert all(one.corrected >= one.difference.p for one in made)


def test_results_over_other_conversations_cannot_be_compared(toy: Toy) -> None:
    ablation = toy.read()
    found = {"deep-0": made_up("deep", 1, 0, [11, 12]), "flat-0": made_up("flat", 1, 0, [11, 12, 13])}
    with pytest.raises(UserError, match="flat: was measured on other held-out conversations than deep; give all cells"):
        compare.rows(ablation, found)


def test_every_figure_is_drawn_as_svg_and_png_the_same_each_time(toy: Toy, tmp_path: Path) -> None:
    ablation, found = scaled(toy)
    rows = compare.rows(ablation, found)
    method = {"law": "T0", "name": "tree", "dtype": "float32", "tau": {"value": 2.0, "low": 1.9, "high": 2.1}}
    method["speedup"] = {"value": 1.2, "low": 1.1, "high": 1.3}
    decoded = {"methods": [method], "setting": "toy"}
    for name in FIGURES:
        for folder in (tmp_path / "a", tmp_path / "b"):
            figures.save(figures.draw(name, rows, "flat", decoded), folder, name)
        svg = (tmp_path / "a" / f"{name}.svg").read_text()
        assert svg == (tmp_path / "b" / f"{name}.svg").read_text(), "a commit shows changes alone"
        ElementTree.fromstring(svg)
        assert (tmp_path / "a" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="'speedup' needs what decode measures, and nothing is decoded yet"):
        figures.draw("speedup", rows, "flat", None)


def test_a_report_leaves_what_was_written_by_hand(done: Toy) -> None:
    readme = done.folder / "README.md"
    readme.write_text(f"# Depth\n\nPrediction: none.\n\n{page.BEGIN}\nold\n{page.END}\n\n## Verdict\n\nDeep wins.\n")
    ran = done.run("report")
    assert ran.code == 0, ran.err
    text = readme.read_text()
    assert text.startswith("# Depth\n\nPrediction: none.\n\n") and text.endswith("## Verdict\n\nDeep wins.\n")
    assert "\nold\n" not in text and "| deep | 2 |" in text and "![tau](figures/tau.svg)" in text
    assert "no difference shown" in text and "Holm" not in text, "a single comparison needs no correction"
    assert done.run("report").code == 0 and readme.read_text() == text
    with (done.folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["cell"] for line in lines] == ["deep-0", "deep-1", "flat-0", "flat-1"]
    assert {"tau_visited", "tau_visited_low", "6_alpha_all_high", "train_loss", "model.unroll.depth"} <= lines[0].keys()
    for name in ("tau.svg", "tau.png", "n_alpha.svg", "n_alpha.png"):
        assert (done.folder / "figures" / name).stat().st_size > 1000
    readme.write_text(f"# Depth\n{page.END}\n")
    assert "the two lines around the results are damaged; remove both" in done.run("report").err
    readme.unlink()


def test_the_parent_run_has_table_figures_and_page_and_an_address_that_shows_the_cells(done: Toy) -> None:
    ran = done.run("ablate")
    client = MlflowClient(store_uri(done.runs), store_uri(done.runs))
    (experiment,) = [one for one in client.search_experiments() if one.name == "depth"]
    assert f"/#/experiments/{experiment.experiment_id}/runs" in ran.out
    (parent,) = client.search_runs([experiment.experiment_id], "tags.kind = 'ablation'")
    kept = {one.path for one in client.list_artifacts(parent.info.run_id)}
    assert {"results.csv", "results.md", "figures"} <= kept
    cells = client.search_runs([experiment.experiment_id], "tags.kind = 'cell'", order_by=["metrics.tau DESC"])
    assert len(cells) == 4
    assert {"tau", "tau_low", "tau_high", "tau_all", "n_alpha_0", "n_alpha_0_low", "n_alpha_0_all"} <= cells[
        0
    ].data.metrics.keys()
    assert {one.data.tags["model.unroll.depth"] for one in cells} == {"1", "2"}
    view = experiment.tags[f"mlflow.sharedViewState.{runs.VIEW}"]
    assert "metrics.`tau`" in json.loads(view)["selectedColumns"]


def test_a_report_without_results_says_what_to_run(toy: Toy) -> None:
    assert toy.run("report").err == f"depth: no cell is done yet; run `ablate {toy.folder}` first\n"
