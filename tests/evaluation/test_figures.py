"""Figures: what they show is the table's numbers, and a file holds more than an empty frame."""

from __future__ import annotations

import io

import pytest
import torch
from matplotlib.image import imread
from several import several

from eagle3_lab.evaluation.figures import FASTEST, SAME, accepted, figures, n_alphas, speedups, times


def test_a_speed_up_is_the_tables_own_with_its_interval_and_the_mean_behind_the_tasks() -> None:
    table = several()
    records = speedups(table)
    assert len(records) == 2 * 3 * (2 + 1) * 2  # laws, methods, tasks and their mean, baselines
    row = next(r for r in table.methods if (r.law, r.task, r.name) == ("T1", "sums", "lookup"))
    (shown,) = [
        r
        for r in records
        if (r["law"], r["task"], r["method"], r["baseline"]) == ("T1", "sums", "lookup, float32", SAME)
    ]
    assert (shown["value"], shown["low"], shown["high"]) == (row.speedup.value, row.speedup.low, row.speedup.high)
    mean = next(o for o in table.overall if (o.law, o.name) == ("T1", "lookup"))
    (shown,) = [
        r
        for r in records
        if (r["law"], r["task"], r["method"], r["baseline"]) == ("T1", "mean", "lookup, float32", FASTEST)
    ]
    assert shown["value"] == mean.speedup_fastest.value
    both = [r.speedup_fastest.value for r in table.methods if (r.law, r.name) == ("T1", "lookup")]
    assert shown["value"] == pytest.approx(sum(both) / 2)


def test_n_alpha_and_accepted_drafts_are_pooled_over_tasks_and_drawn_for_what_drafts() -> None:
    table = several()
    alphas = [r for r in n_alphas(table) if r["law"] == "T0"]
    assert {r["method"] for r in alphas} == {"lookup, float32"}
    # chat: [3 0 2 0] and [3 3 3 3]; sums: [2 0 2 0] and [3 3 3 3]: of 16 rounds 12, 12, 9 accept at depth 0, 1, 2
    assert [(r["n"], r["value"]) for r in alphas] == [(0, 12 / 16), (1, 12 / 12), (2, 9 / 12)]
    assert all(r["low"] <= r["value"] <= r["high"] for r in alphas)
    shares = [r for r in accepted(table) if r["law"] == "T0"]
    assert [r["rounds"] for r in shares] == [4, 0, 3, 9]
    assert sum(r["value"] for r in shares) == pytest.approx(1)


def test_times_are_milliseconds_a_token_and_their_stages_make_up_the_wall() -> None:
    for record in times(several()):
        assert sum(record["stages"].values()) == pytest.approx(record["value"])
        assert record["low"] <= record["value"] <= record["high"]


@pytest.mark.parametrize("tasks", [("chat",), ("chat", "sums")], ids=["one task", "two tasks"])
def test_every_figure_is_drawn_with_all_its_marks(tasks: tuple[str, ...]) -> None:
    made = figures(several(tasks=tasks))
    assert [figure.name for figure in made] == ["speedups", "times", "n_alpha", "accepted"]
    for figure in made:
        drawing, file = figure.draw(figure.records), io.BytesIO()
        drawing.savefig(file, format="png")
        file.seek(0)
        pixels = torch.tensor(imread(file))
        inked = (pixels[..., :3] < 0.95).any(-1).float().mean()
        assert min(pixels.shape[:2]) > 200
        assert 0.01 < float(inked) < 0.6, figure.name
        assert drawing.axes[0].get_ylabel() or drawing.axes[0].get_xlabel()
        assert len(drawing.axes) == 2 * (2 if figure.name == "speedups" else 1)


def test_a_bar_stands_for_every_task_and_method_as_high_as_its_record() -> None:
    (figure,) = [one for one in figures(several()) if one.name == "speedups"]
    first = figure.draw(figure.records).axes[0]
    heights = sorted(bar.get_height() for bar in first.patches)
    shown = sorted(r["value"] for r in figure.records if (r["law"], r["baseline"]) == ("T0", SAME))
    assert heights == pytest.approx(shown)
    assert len(first.collections) == 3, "a set of error bars a method"


def test_without_drafts_there_are_two_figures_and_without_rows_none() -> None:
    assert [figure.name for figure in figures(several(drafting=False))] == ["speedups", "times"]
    assert figures(several(laws=())) == []
