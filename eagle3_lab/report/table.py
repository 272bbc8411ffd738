"""The closing table: what a run measured, as plain text, as markdown for the run's page, and as JSON.

Four small tables: speed, n-alpha, the histogram of accepted drafts, and where the time went; then where to find more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from eagle3_lab.intervals import Interval, ratio_interval, speedup_interval
from eagle3_lab.metrics import Acceptance, looping
from eagle3_lab.types import Decoded

STAGES = ("prefill", "draft", "verify", "host")


@dataclass(frozen=True)
class MethodResult:
    """One row: a method under one dtype over all prompts.

    ``tau`` and ``engine_tau`` as in :mod:`eagle3_lab.metrics`; ``tau_tidy`` without the answers that loop, whose share
    is ``looping``. ``speedup`` over vanilla in the same dtype, ``speedup_fastest`` over the fastest vanilla of this
    machine. ``histogram[a]`` rounds that accepted a drafts. ``seconds`` of the decoder's clock in all, by stage.
    """

    name: str
    dtype: str
    lossless: bool
    prompts: int
    tokens: int
    tau: Interval
    tau_tidy: float
    engine_tau: float
    looping: float
    tokens_per_s: Interval
    speedup: Interval
    speedup_fastest: Interval
    n_alpha: tuple[float, ...]
    histogram: tuple[int, ...]
    seconds: dict[str, float]


@dataclass(frozen=True)
class OnePass:
    """The hit table's two readings on held-out greedy text: all anchors, and visited anchors (with an interval over
    answers), which is what a chain decoder would give."""

    tau_expected: float
    tau_walked: Interval
    n_alpha_all: tuple[float, ...]
    n_alpha_walked: tuple[float, ...]


@dataclass(frozen=True)
class ClosingTable:
    """Everything a run closes with. ``setting`` says on what it was measured (target, device, law, prompts); ``ui`` is
    the command that shows the store, ``page`` the run's place in it."""

    setting: str
    methods: tuple[MethodResult, ...]
    one_pass: OnePass | None
    run_id: str
    checkpoint: str
    ui: str
    page: str


@dataclass(frozen=True)
class Answered:
    """One prompt's answers, one for each turn, and the wall seconds of decoding them. Prompts are what the bootstrap
    resamples."""

    turns: tuple[Decoded, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all turns, the prefills' included: they were waited for as well."""
        return sum(len(d.tokens) for d in self.turns)


def method_result(
    name: str,
    dtype: str,
    answered: Sequence[Answered],
    vanilla: Sequence[Answered],
    fastest: Sequence[Answered],
    depth: int,
    generator: torch.Generator,
    lossless: bool = True,
) -> MethodResult:
    """Measure one row from answers to the same prompts, in the same order.

    Args:
        name: shown in the table.
        dtype: the target's, under which ``answered`` and ``vanilla`` were made.
        answered: the method's answers.
        vanilla: vanilla's in the same dtype.
        fastest: vanilla's in the dtype in which it is fastest on this machine.
        depth: how many levels the method drafts (0 for vanilla).
        generator: of the bootstrap, on the CPU.
        lossless: the verifier's promise.

    Raises: ValueError where the three do not hold the same number of prompts.
    """
    turns = [d for prompt in answered for d in prompt.turns]
    acceptance, loops = Acceptance.of((r for d in turns for r in d.rounds), depth), looping(turns)
    rounds = [sum(len(d.rounds) for d in prompt.turns) for prompt in answered]
    emitted = [sum(r.emitted for d in prompt.turns for r in d.rounds) for prompt in answered]
    tokens, seconds = _costs(answered)
    return MethodResult(
        name=name,
        dtype=dtype,
        lossless=lossless,
        prompts=len(answered),
        tokens=sum(tokens),
        tau=ratio_interval(emitted, rounds, generator),
        tau_tidy=loops.tau_without,
        engine_tau=acceptance.engine_tau,
        looping=loops.share,
        tokens_per_s=ratio_interval(tokens, seconds, generator),
        speedup=speedup_interval(tokens, seconds, *_costs(vanilla), generator),
        speedup_fastest=speedup_interval(tokens, seconds, *_costs(fastest), generator),
        n_alpha=acceptance.n_alpha,
        histogram=acceptance.histogram,
        seconds={stage: sum(d.seconds.get(stage, 0.0) for d in turns) for stage in STAGES},
    )


def _costs(answered: Sequence[Answered]) -> tuple[list[int], list[float]]:
    return [prompt.tokens for prompt in answered], [prompt.seconds for prompt in answered]


# --------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Grid:
    """A small table: the head's first cell says what it is about."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_text(table: ClosingTable) -> str:
    """For a terminal: aligned columns."""
    return "\n\n".join((table.setting, *map(_text_grid, _grids(table)), "\n".join(_where(table)))) + "\n"


def as_markdown(table: ClosingTable) -> str:
    """For the run's page and for notes."""
    where = "\n".join(f"- {line}" for line in _where(table))
    return "\n\n".join((table.setting, *map(_markdown_grid, _grids(table)), where)) + "\n"


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
    drafting = [m for m in table.methods if m.n_alpha]
    grids = [_speed(table.methods)]
    if drafting or table.one_pass:
        grids.append(_alphas(drafting, table.one_pass))
    if drafting:
        grids.append(_histograms(drafting))
    return [*grids, _times(table.methods)]


def _speed(methods: Sequence[MethodResult]) -> Grid:
    head = ("method", "tau [95 %]", "without loops", "tokens/s [95 %]", "speed-up [95 %]", "over fastest vanilla")
    rows = (
        (_name(m), str(m.tau), _number(m.tau_tidy), str(m.tokens_per_s), str(m.speedup), str(m.speedup_fastest))
        for m in methods
    )
    return Grid(head, tuple(rows))


def _alphas(methods: Sequence[MethodResult], one_pass: OnePass | None) -> Grid:
    lines = [(_name(m), str(m.tau), m.n_alpha) for m in methods]
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
        rows.append((_name(m), f"{total:.1f}", *shares, str(m.tokens), str(m.prompts), f"{m.looping:.0%}"))
    return Grid(head, tuple(rows))


def _name(method: MethodResult) -> str:
    return f"{method.name}, {method.dtype}" + ("" if method.lossless else " (lossy)")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _padded(cells: Iterable[str], width: int) -> list[str]:
    known = list(cells)
    return known + [""] * (width - len(known))


def _where(table: ClosingTable) -> list[str]:
    return [f"run: {table.run_id}", f"checkpoint: {table.checkpoint}", f"look: {table.ui}  then  {table.page}"]


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
