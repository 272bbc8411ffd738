"""An ablation's figures: drawn from rows and comparisons, each as SVG and PNG.

Every number carries its 95 % interval; lines are named at their ends and bars beside them, so no legend has to be
matched; colours are Okabe and Ito's, which the colour-blind can tell apart, and marks differ too. The ground is white,
so that figures read alike on a light and on a dark page.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_lab.ablation.compare import Row
from eagle3_lab.ablation.results import ALL, VISITED
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.bootstrap import Interval

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#000000", "#E69F00")
MARKS = "osD^vPX*"
TEXT = 9

Decoded = dict[str, Any]
"""What decoding gave: a closing table as JSON, see `report.table.as_json`."""


def draw(name: str, rows: Sequence[Row], against: str, decoded: Decoded | None) -> Figure:
    """Return a figure of `figure_names.FIGURES`.

    Raises:
        UserError: its data is not there yet.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # tells that it reads fonts, the first time
    drawings: dict[str, Callable[[], Figure]] = {
        "tau": lambda: _tau(rows, against),
        "n_alpha": lambda: _n_alpha(rows),
        "tau_by_data": lambda: _by_data(rows, [("tau", lambda row: row.tau[VISITED])]),
        "n_alpha_by_data": lambda: _by_data(
            rows, [(f"{n}-alpha", lambda row, n=n: row.n_alpha[ALL][n]) for n in (0, 1)]
        ),
        "speedup": lambda: _speedup(decoded),
    }
    return drawings[name]()


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write ``name.svg`` and ``name.png``. Raises UserError where that cannot be written."""
    from matplotlib import rc_context

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": name}):  # the same file for the same data
            figure.savefig(folder / f"{name}.svg", facecolor="white", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", facecolor="white", dpi=130, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"{folder}: figures cannot be written ({error.strerror}); make the folder writable") from None


# ----------------------------------------------------------------------------------------------------------- drawings


def _tau(rows: Sequence[Row], against: str) -> Figure:
    """A bar a row, its seeds as dots, the base cell's tau as a dashed line."""
    figure, (axes,) = _axes(1, width=6.4, height=1.1 + 0.42 * len(rows))
    lowest = min([1.0, *(value.low for row in rows for value in [row.tau[VISITED]])])
    for y, row in enumerate(rows):
        value = row.tau[VISITED]
        colour = COLOURS[0] if row.cell == against else COLOURS[1]
        axes.barh(y, value.value - lowest, 0.62, left=lowest, color=colour)
        axes.errorbar(value.value, y, xerr=_bars(value), fmt="none", ecolor="black", capsize=3, linewidth=1)
        if len(row.results) > 1:
            axes.plot(row.by_seed[VISITED], [y] * len(row.results), "o", color="white", mec="black", ms=4, mew=0.7)
        end = max(value.high, *row.by_seed[VISITED])
        axes.annotate(f"{value.value:.2f}", (end, y), (5, 0), textcoords="offset points", va="center", size=TEXT)
        if row.cell == against:
            axes.axvline(value.value, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlim(left=lowest)
    seeds = "; dots: seeds" if any(len(row.results) > 1 for row in rows) else ""
    axes.set_xlabel(f"tau, tokens a round (visited anchors; bars: 95 % intervals{seeds})")
    return figure


def _n_alpha(rows: Sequence[Row]) -> Figure:
    """A line a row over n."""
    figure, (axes,) = _axes(1, width=6.8, height=4.2)
    ends: list[tuple[float, float, str, str]] = []
    for k, row in enumerate(rows):
        values = [(n, value) for n, value in enumerate(row.n_alpha[ALL]) if not math.isnan(value.value)]
        if values:
            shift = 0.24 * ((k + 0.5) / len(rows) - 0.5)
            _line(axes, k, [n + shift for n, _ in values], [value for _, value in values])
            ends.append((float(values[-1][0]), values[-1][1].value, row.label, COLOURS[k % len(COLOURS)]))
    _name_ends(axes, ends)
    axes.set(xlabel="n (drafts of the round accepted before)", ylabel="n-alpha (all anchors, 95 % intervals)")
    axes.set_xticks(range(max((len(row.n_alpha[ALL]) for row in rows), default=1)))
    return figure


def _by_data(rows: Sequence[Row], quantities: Sequence[tuple[str, Callable[[Row], Interval]]]) -> Figure:
    """A line a cell over tokens trained on; a cell at one scale is a mark."""
    figure, every = _axes(len(quantities), width=6.4 if len(quantities) == 1 else 5.2 * len(quantities), height=4.2)
    cells = list(dict.fromkeys(row.cell for row in rows))
    for axes, (name, value_of) in zip(every, quantities, strict=True):
        ends: list[tuple[float, float, str, str]] = []
        for k, cell in enumerate(cells):
            own = sorted((row for row in rows if row.cell == cell), key=lambda row: row.tokens)
            _line(axes, k, [float(row.tokens) for row in own], [value_of(row) for row in own])
            ends.append((float(own[-1].tokens), value_of(own[-1]).value, cell, COLOURS[k % len(COLOURS)]))
        axes.set_xscale("log", base=2)
        ticks = sorted(
            {row.tokens for row in rows if row.cell == max(cells, key=lambda c: sum(r.cell == c for r in rows))}
        )
        axes.set_xticks(ticks, [f"{tick / 1000:.0f}k" for tick in ticks])
        axes.minorticks_off()
        _name_ends(axes, ends)
        axes.set(xlabel="tokens trained on, passes counted (log)", ylabel=f"{name} (95 % intervals)")
    return figure


def _speedup(decoded: Decoded | None) -> Figure:
    """Speed-up bars by method, a panel a law, tau beside each."""
    if decoded is None:
        raise UserError(
            "figures: 'speedup' needs what decode measures, and nothing is decoded yet; run `ablate` to its end"
        )
    methods = [row for row in decoded["methods"] if row["name"] != "vanilla"]
    laws = list(dict.fromkeys(row["law"] for row in methods))
    names = list(dict.fromkeys(row["name"] for row in methods))
    figure, every = _axes(len(laws), width=4.8 * len(laws), height=1.2 + 0.42 * len(names))
    for axes, law in zip(every, laws, strict=True):
        for row in methods:
            if row["law"] == law:
                y, value = names.index(row["name"]), Interval(**row["speedup"])
                axes.barh(y, value.value, 0.62, color=COLOURS[0])
                axes.errorbar(value.value, y, xerr=_bars(value), fmt="none", ecolor="black", capsize=3, linewidth=1)
                text = f"{value.value:.2f}x, tau {row['tau']['value']:.2f}"
                axes.annotate(text, (value.high, y), (5, 0), textcoords="offset points", va="center", size=TEXT)
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set(title=law, xlabel="speed-up over vanilla (95 % intervals)")
    return figure


# -------------------------------------------------------------------------------------------------------------- pieces


def _axes(panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    every = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=TEXT)
    return figure, every


def _line(axes: Axes, k: int, x: Sequence[float], values: Sequence[Interval]) -> None:
    """The k-th line, with its intervals."""
    colour = COLOURS[k % len(COLOURS)]
    bounds = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
    bounds = [[max(0.0, one) for one in side] for side in bounds]
    style = {"color": colour, "marker": MARKS[k % len(MARKS)], "markersize": 5, "linewidth": 1.4, "capsize": 2}
    axes.errorbar(x, [v.value for v in values], yerr=bounds, **style)


def _bars(value: Interval) -> list[list[float]]:
    return [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name beside its end, one above the other where ends lie close."""
    low, high = axes.get_ylim()
    step = (high - low) * 0.055
    at = -math.inf
    right = max(x for x, _, _, _ in ends) if ends else 0
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        at = max(y, at + step)
        place = (1.01, at) if x == right else (x, at)
        transform = axes.get_yaxis_transform() if x == right else axes.transData
        axes.annotate(
            name, place, (0 if x == right else 6, 0), xycoords=transform, textcoords="offset points", va="center",
            color=colour, size=TEXT, annotation_clip=False,
        )  # fmt: skip
    axes.set_ylim(low, max(high, at + step))
