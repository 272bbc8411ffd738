"""The closing table as figures: speed-up by method, n-alpha by n, accepted drafts a round, and where the time goes.

Each figure is drawn from flat records, which are kept beside it: to be drawn again in another way. Bars and marks carry
their 95 % bootstrap intervals. Nothing here knows a method by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3_lab.evaluation.bootstrap import Column, Interval
from eagle3_lab.evaluation.results import STAGES, ClosingTable, MethodResult, Overall

if TYPE_CHECKING:  # matplotlib takes a second to import, and many commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Record = dict[str, Any]

MEAN = "mean"
SAME, FASTEST = "over vanilla, same dtype", "over the fastest vanilla"
STAGE_COLOURS = dict(zip(STAGES, ("tab:gray", "tab:orange", "tab:blue", "tab:red"), strict=True))
DRAFTED_BY = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
MARKS = "osD^v<>P*X"


@dataclass(frozen=True)
class Figure:
    """One figure: its file's name without ending, its records, and how they are drawn."""

    name: str
    records: list[Record]
    draw: Callable[[list[Record]], Drawing]


def figures(table: ClosingTable) -> list[Figure]:
    """Those that the table's rows give: none without rows, two where nothing drafts."""
    if not table.methods:
        return []
    found = [Figure("speedups", speedups(table), draw_speedups), Figure("times", times(table), draw_times)]
    if alphas := n_alphas(table):
        found += [Figure("n_alpha", alphas, draw_n_alphas), Figure("accepted", accepted(table), draw_accepted)]
    return found


# ------------------------------------------------------------------------------------------------------------ records


def speedups(table: ClosingTable) -> list[Record]:
    """A record for each law, task (and their mean), method and baseline."""
    found = []
    for law in table.laws:
        overall = [(MEAN, o) for o in table.overall if o.law == law]
        for task, row in [*((row.task, row) for row in table.rows(law)), *overall]:
            for baseline, value in ((SAME, row.speedup), (FASTEST, row.speedup_fastest)):
                found.append(_record(law, row, value, task=task, baseline=baseline))
    return found


def n_alphas(table: ClosingTable) -> list[Record]:
    """A record for each law, method and depth n, over all tasks; depths that were never judged are left out."""
    return [
        _record(law, row, value, n=n)
        for law in table.laws
        for row in table.pooled(law)
        for n, value in enumerate(row.n_alpha)
        if not math.isnan(value.value)
    ]


def accepted(table: ClosingTable) -> list[Record]:
    """A record for each law, drafting method and number of accepted drafts: its share of all rounds, over all tasks."""
    return [
        _record(law, row, value, accepted=count, rounds=row.histogram[count])
        for law in table.laws
        for row in table.pooled(law)
        if row.n_alpha
        for count, value in enumerate(row.accepted)
        if not math.isnan(value.value)
    ]


def times(table: ClosingTable) -> list[Record]:
    """A record for each law and method, over all tasks: milliseconds a token by the wall, and by stage of the decoder's
    own clock."""
    found = []
    for law in table.laws:
        for row in table.pooled(law):
            speed = row.tokens_per_s
            wall = Interval(1e3 / speed.value, 1e3 / speed.high, 1e3 / speed.low)
            stages = {stage: 1e3 * row.seconds[stage] / row.tokens for stage in STAGES}
            found.append(_record(law, row, wall, stages=stages))
    return found


def _record(law: str, row: MethodResult | Overall, value: Interval, **more: object) -> Record:
    name = f"{row.name}, {row.dtype}" + ("" if row.lossless else " (lossy)")
    return {"law": law, "method": name, **more, "value": value.value, "low": value.low, "high": value.high}


# ----------------------------------------------------------------------------------------------------------- drawing


def draw_speedups(records: list[Record]) -> Drawing:
    """Bars by task, a colour a method; a row of panels a baseline where the two differ, a column a law."""
    same, fastest = ([r["value"] for r in records if r["baseline"] == b] for b in (SAME, FASTEST))
    baselines = [SAME] if same == fastest else [SAME, FASTEST]
    laws, methods, tasks = (_distinct(records, key) for key in ("law", "method", "task"))
    width = 0.8 / len(methods)
    drawing, panels = _panels(baselines, laws, size=(max(4.0, 0.5 + 0.4 * len(tasks) * len(methods)), 3.2))
    for i, baseline in enumerate(baselines):
        for j, law in enumerate(laws):
            axes = panels[i][j]
            for k, method in enumerate(methods):
                own = [r for r in _where(records, law=law, method=method) if r["baseline"] == baseline]
                x = [tasks.index(r["task"]) + (k - (len(methods) - 1) / 2) * width for r in own]
                axes.bar(x, [r["value"] for r in own], 0.92 * width, color=_colour(k), label=method)
                _errors(axes, x, own)
                for at, r in zip(x, own, strict=True):
                    if not math.isnan(r["value"]):
                        text = f"{r['value']:.2f}"
                        axes.annotate(text, (at, r["high"]), (0, 2), textcoords="offset points", ha="center", size=7)
            axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
            axes.set_xticks(range(len(tasks)), tasks)
            axes.set_title(law if i == 0 else "")
            axes.margins(y=0.12)
        panels[i][0].set_ylabel(f"speed-up\n{baseline}")
    return _finished(drawing, panels, len(methods))


def draw_n_alphas(records: list[Record]) -> Drawing:
    """A line a method, a panel a law. Marks of one n stand side by side, so that their intervals can be told apart."""
    laws, methods = _distinct(records, "law"), _distinct(records, "method")
    drawing, panels = _panels([""], laws, size=(4.8, 3.4))
    for j, law in enumerate(laws):
        axes = panels[0][j]
        for k, method in enumerate(methods):
            own = _where(records, law=law, method=method)
            x = [r["n"] + 0.3 * ((k + 0.5) / len(methods) - 0.5) for r in own]
            mark = {"color": _colour(k), "marker": MARKS[k % len(MARKS)], "markersize": 4, "linewidth": 1}
            axes.plot(x, [r["value"] for r in own], label=method, **mark)
            _errors(axes, x, own, colour=_colour(k))
        axes.set(xlabel="n (drafts of the round accepted before)", ylim=(-0.03, 1.03), title=law)
        axes.set_xticks(range(max(r["n"] for r in records) + 1))
    panels[0][0].set_ylabel("n-alpha")
    return _finished(drawing, panels, len(methods))


def draw_accepted(records: list[Record]) -> Drawing:
    """A panel of bars for each method and law."""
    laws, methods = _distinct(records, "law"), _distinct(records, "method")
    drawing, panels = _panels(methods, laws, size=(4.2, 1.7))
    deepest, highest = max(r["accepted"] for r in records), max(r["high"] for r in records)
    for i, method in enumerate(methods):
        for j, law in enumerate(laws):
            axes, own = panels[i][j], _where(records, law=law, method=method)
            x = [r["accepted"] for r in own]
            axes.bar(x, [r["value"] for r in own], 0.8, color=_colour(i))
            _errors(axes, x, own)
            axes.set(xlim=(-0.6, deepest + 0.6), ylim=(0, 1.08 * highest))
            axes.set_xticks(range(deepest + 1))
            axes.set_title(f"{method}, {law}", size=9)
        panels[i][0].set_ylabel("share of rounds", size=8)
    for axes in panels[-1]:
        axes.set_xlabel("accepted drafts")
    return _finished(drawing, panels)


def draw_times(records: list[Record]) -> Drawing:
    """Lying bars, milliseconds a token by stage, the wall's mean and interval as a mark; a panel a law."""
    laws, methods = _distinct(records, "law"), _distinct(records, "method")
    drawing, panels = _panels([""], laws, size=(5.2, 1.2 + 0.35 * len(methods)))
    for j, law in enumerate(laws):
        axes, own = panels[0][j], _where(records, law=law)
        y = [methods.index(r["method"]) for r in own]
        before = [0.0] * len(own)
        for stage in STAGES:
            spent = [r["stages"][stage] for r in own]
            axes.barh(y, spent, 0.7, left=before, color=STAGE_COLOURS[stage], label=stage)
            before = [a + b for a, b in zip(before, spent, strict=True)]
        wall = [r["value"] for r in own]
        axes.errorbar(wall, y, xerr=_bounds(own), fmt="k|", markersize=9, capsize=3, linewidth=1, label="wall")
        axes.set_yticks(range(len(methods)), methods)
        axes.set(xlabel="ms a token", title=law, ylim=(len(methods) - 0.5, -0.5))
    return _finished(drawing, panels, len(STAGES) + 1)


def _panels(rows: Sequence[str], columns: Sequence[str], size: tuple[float, float]) -> tuple[Drawing, list[list[Axes]]]:
    """``size``: inches of one panel. All panels share x, those of a row share y."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # tells that it reads fonts, the first time
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing((size[0] * len(columns), size[1] * len(rows) + 0.6), layout="constrained")
    found = drawing.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
    return drawing, [list(row) for row in found]


def _finished(drawing: Drawing, panels: list[list[Axes]], labels: int = 0) -> Drawing:
    """With one legend of so many labels above all panels; none for 0."""
    for axes in (axes for row in panels for axes in row):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    if labels:
        handles, names = panels[0][0].get_legend_handles_labels()
        columns = max(1, min(labels, int(drawing.get_figwidth() / 1.8)))
        drawing.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=8, frameon=False)
    return drawing


def _errors(axes: Axes, x: Column, records: Sequence[Record], colour: str = "black") -> None:
    axes.errorbar(x, [r["value"] for r in records], _bounds(records), fmt="none", ecolor=colour, capsize=2, linewidth=1)


def _bounds(records: Sequence[Record]) -> list[list[float]]:
    """How far the interval reaches below and above: never negative, where rounding would have it so."""
    below = [max(r["value"] - r["low"], 0.0) for r in records]
    return [below, [max(r["high"] - r["value"], 0.0) for r in records]]


def _distinct(records: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in records))


def _where(records: Sequence[Record], **wanted: str) -> list[Record]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _colour(index: int) -> str:
    return DRAFTED_BY[index % len(DRAFTED_BY)]
