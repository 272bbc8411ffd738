"""The closing table: what a run measured, as plain text, as markdown for the run's page, and as JSON.

Four small tables a law: speed, n-alpha, the histogram of accepted drafts, and where the time went; then where to find
more. Where there are several tasks, speed is a table each of speed-up and tau, a column a task and their mean, and the
other three are over all prompts of all tasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from eagle3_lab.evaluation.bootstrap import Interval
from eagle3_lab.evaluation.results import STAGES, ClosingTable, MethodResult, OnePass, Overall

# --------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Grid:
    """A small table: the head's first cell says what it is about."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_text(table: ClosingTable) -> str:
    """For a terminal: aligned columns."""
    return "\n\n".join((table.setting, *map(_text_grid, _grids(table)), "\n".join(_where(table)))) + "\n"


def as_markdown(table: ClosingTable, most: int | None = None) -> str:
    """For the run's page and for notes. ``most``: so many characters; of a longer one the first tables, those of speed
    under each law before the others, and where the rest is."""
    where = "\n".join(f"- {line}" for line in _where(table))
    grids = list(map(_markdown_grid, _grids(table)))
    whole = "\n\n".join((table.setting, *grids, where)) + "\n"
    if most is None or len(whole) <= most:
        return whole
    speed_first = [text for law in _laws(table) for text in map(_markdown_grid, _titled(table, law)[:1])]
    kept = [table.setting, *speed_first]
    rest = "\n\n- the other tables: closing.txt among the run's artifacts\n" + where + "\n"
    for text in grids:
        if text not in kept and len("\n\n".join((*kept, text))) + len(rest) <= most:
            kept.append(text)
    return ("\n\n".join(kept) + rest)[:most]


def as_json(table: ClosingTable) -> str:
    """Every number in full; what could not be measured (NaN) is null."""
    return json.dumps(_plain(asdict(table)), indent=2, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _grids(table: ClosingTable) -> list[Grid]:
    return [grid for law in _laws(table) for grid in _titled(table, law)]


def _laws(table: ClosingTable) -> list[str]:
    return list(table.laws) or [""]


def _titled(table: ClosingTable, law: str) -> list[Grid]:
    """The tables of a law, which say so where there are several."""
    laws = _laws(table)
    one_pass = table.one_pass if law == laws[0] else None  # it reads greedy text, whatever is drawn elsewhere
    grids = []
    for grid in filter(lambda grid: grid.rows, _law_grids(table, law, one_pass)):  # nothing decoded: no rows
        title = f"{law}: {grid.head[0]}" if len(laws) > 1 else grid.head[0]
        grids.append(replace(grid, head=(title, *grid.head[1:])))
    return grids


def _law_grids(table: ClosingTable, law: str, one_pass: OnePass | None) -> list[Grid]:
    overall = [o for o in table.overall if o.law == law]
    pooled = table.pooled(law)
    grids = _by_task(table.rows(law), overall, table.tasks) if overall else [_speed(pooled)]
    drafting = [m for m in pooled if m.n_alpha]
    if drafting or one_pass:
        grids.append(_alphas(drafting, one_pass))
    if drafting:
        grids.append(_histograms(drafting))
    return [*grids, _times(pooled)]


def _by_task(rows: Sequence[MethodResult], overall: Sequence[Overall], tasks: Sequence[str]) -> list[Grid]:
    """Like the papers' tables: a row a method, a column a task, and their mean."""

    def grid(what: str, cell: Callable[[MethodResult], str], mean: Callable[[Overall], str], last: str) -> Grid:
        lines = []
        for o in overall:
            own = {row.task: row for row in rows if (row.name, row.dtype) == (o.name, o.dtype)}
            lines.append((_name(o), *(cell(own[task]) for task in tasks), mean(o)))
        return Grid((what, *tasks, last), tuple(lines))

    grids = [grid("speed-up [95 %]", lambda m: str(m.speedup), lambda o: str(o.speedup), "mean")]
    if any(o.speedup.value != o.speedup_fastest.value for o in overall):
        last = ("over fastest vanilla", lambda m: str(m.speedup_fastest), lambda o: str(o.speedup_fastest), "mean")
        grids.append(grid(*last))
    grids.append(grid("tokens/s [95 %]", lambda m: str(m.tokens_per_s), lambda o: str(o.tokens_per_s), "mean"))
    grids.append(grid("tau [95 %]", lambda m: str(m.tau), lambda o: str(o.tau), "mean"))
    tidy = "tau without loops (their share)"
    return [*grids, grid(tidy, _tidy, lambda o: _tidy(o.pooled), "all prompts")]


def _tidy(m: MethodResult) -> str:
    return f"{m.tau_tidy} ({_share(m.looping)})"


def _speed(methods: Sequence[MethodResult]) -> Grid:
    head = ("method", "tau [95 %]", "without loops", "tokens/s [95 %]", "speed-up [95 %]", "over fastest vanilla")
    rows = (
        (_name(m), str(m.tau), _number(m.tau_tidy.value), str(m.tokens_per_s), str(m.speedup), str(m.speedup_fastest))
        for m in methods
    )
    return Grid(head, tuple(rows))


def _alphas(methods: Sequence[MethodResult], one_pass: OnePass | None) -> Grid:
    lines = [(_name(m), str(m.tau), tuple(alpha.value for alpha in m.n_alpha)) for m in methods]
    if one_pass:
        lines.append(("one pass, all anchors", _number(one_pass.tau_expected), one_pass.n_alpha_all))
        lines.append(("one pass, visited anchors", str(one_pass.tau_walked), one_pass.n_alpha_walked))
    depth = max(len(alphas) for _, _, alphas in lines)
    head = ("n-alpha", "tau", *(f"{n}-alpha" for n in range(depth)))
    return Grid(head, tuple((name, tau, *_padded(map(_number, alphas), depth)) for name, tau, alphas in lines))


def _histograms(methods: Sequence[MethodResult]) -> Grid:
    widest = max(len(m.histogram) for m in methods)
    head = ("rounds by accepted drafts", *map(str, range(widest)), "engine tau")
    rows = ((_name(m), *_padded(map(str, m.histogram), widest), _number(m.engine_tau)) for m in methods)
    return Grid(head, tuple(rows))


def _times(methods: Sequence[MethodResult]) -> Grid:
    head = ("time", "seconds", *STAGES, "tokens", "prompts", "looping")
    rows = []
    for m in methods:
        total = sum(m.seconds.values())
        shares = (f"{m.seconds[stage] / total:.0%}" if total else "-" for stage in STAGES)
        rows.append((_name(m), f"{total:.1f}", *shares, str(m.tokens), str(m.prompts), _share(m.looping)))
    return Grid(head, tuple(rows))


def _name(method: MethodResult | Overall) -> str:
    return f"{method.name}, {method.dtype}" + ("" if method.lossless else " (lossy)")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _share(value: Interval) -> str:
    return "-" if math.isnan(value.value) else f"{value.value:.0%}"


def _padded(cells: Iterable[str], width: int) -> list[str]:
    known = list(cells)
    return known + [""] * (width - len(known))


def _where(table: ClosingTable) -> list[str]:
    found = [f"run: {table.run_id}", f"checkpoint: {table.checkpoint}", f"look: {table.ui}  then  {table.page}"]
    return [*(f"note: {note}" for note in table.notes), *found]


def _text_grid(grid: Grid) -> str:
    columns = list(zip(grid.head, *grid.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (grid.head, *grid.rows):
        cells = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def _markdown_grid(grid: Grid) -> str:
    rule = ("---", *("---:" for _ in grid.head[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (grid.head, rule, *grid.rows))
