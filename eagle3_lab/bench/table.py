"""What `bench decode` found: curves, methods, rivals, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from eagle3_lab import seeds
from eagle3_lab.bench.costs import Curves, Cycle
from eagle3_lab.decode.auto_tree import Choice
from eagle3_lab.evaluation.bootstrap import Interval, speedup_interval

SHOWN = 3

Answers = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class MethodSpeed:
    """One method: its ``cycle`` by the curves (draft by calibration), the tokens/s that this and tau predict, and those
    measured. ``host_share`` of the cycle is neither the target's forward nor drafting, hence more than ``cycle.host``:
    law, verdict, commit and the one read are in ``cycle.verify``, beside the forward. ``speedup`` over vanilla;
    ``seconds`` a median answer took."""

    name: str
    lossless: bool
    nodes: int
    tau: float
    cycle: Cycle
    host_share: float
    tokens_per_s: float
    predicted: float
    speedup: float
    seconds: float

    @property
    def off(self) -> float:
        """The prediction's error, as a share of what was measured."""
        return self.predicted / self.tokens_per_s - 1


@dataclass(frozen=True)
class RivalSpeed:
    """One way of transformers' generate, at the fastest ``setting`` of those tried; ``ours`` is how many times as fast
    the fastest of our methods of that kind is, ``against``, over prompts resampled."""

    name: str
    setting: str
    tokens: int
    tokens_per_s: float
    speedup: float
    against: str
    ours: Interval

    @staticmethod
    def of(name: str, setting: str, answers: Answers, base: float, beside: Mapping[str, Answers]) -> RivalSpeed:
        """``answers`` and, by method, those of our counterparts: tokens and seconds of every prompt."""
        against = max(beside, key=lambda one: _rate(beside[one]))
        (mine, my_seconds), (tokens, seconds) = zip(*beside[against], strict=True), zip(*answers, strict=True)
        ours = speedup_interval(mine, my_seconds, tokens, seconds, seeds.generator(seeds.bootstrap_seed(0, "rivals")))
        rate = _rate(answers)
        return RivalSpeed(name, setting, sum(tokens), rate, rate / base, against, ours)


@dataclass(frozen=True)
class BenchTable:
    """Everything; ``head`` says where the head is from, ``context`` how many tokens the curves stand behind."""

    setting: str
    head: str
    context: int
    curves: Curves
    methods: Sequence[MethodSpeed]
    rivals: Sequence[RivalSpeed]
    trees: Sequence[Choice] = ()  # dynamic trees of the head, the most promising first


def as_json(table: BenchTable) -> str:
    """All of it; seconds."""
    said = asdict(table)
    for row, method in zip(said["methods"], table.methods, strict=True):
        row["off"] = method.off
    return json.dumps(said, indent=1) + "\n"


def as_text(table: BenchTable) -> str:
    """Small tables, a line each; milliseconds."""
    lines = [table.setting, f"head: {table.head}", "", f"cost of n nodes behind {table.context} tokens, ms (medians)"]
    lines += _rows(
        ["n", "forward", "verify", "host"],
        [[str(n), _ms(table.curves.forward[n]), _ms(c.verify), _ms(c.host)] for n, c in table.curves.verify.items()],
    )
    if table.curves.draft:
        lines += ["", "cost of a draft level of w rows, ms"]
        lines += _rows(["w", "draft"], [[str(w), _ms(s)] for w, s in table.curves.draft.items()])
    lines += ["", "one cycle, ms; tokens per second as the cycle and tau predict, and measured"]
    lines += ["over %: of the cycle, neither drafting nor the target's forward: host, and the rest of verify"]
    lines += _rows(
        ["method", "nodes", "tau", "draft", "verify", "host", "over %", "predicted", "measured", "off %", "x vanilla"],
        [
            [
                m.name if m.lossless else f"{m.name} (lossy)",
                str(m.nodes),
                f"{m.tau:.2f}",
                *(_ms(s) for s in (m.cycle.draft, m.cycle.verify, m.cycle.host)),
                f"{100 * m.host_share:.1f}",
                f"{m.predicted:.2f}",
                f"{m.tokens_per_s:.2f}",
                f"{100 * m.off:+.1f}",
                f"{m.speedup:.2f}",
            ]
            for m in table.methods
        ],
    )
    if table.rivals:
        lines += ["", "transformers' own generation, same model, prompts and lengths"]
        lines += _rows(
            ["method", "setting", "tokens", "tokens/s", "x vanilla", "ours", "times as fast"],
            [
                [
                    r.name,
                    r.setting,
                    str(r.tokens),
                    f"{r.tokens_per_s:.2f}",
                    f"{r.speedup:.2f}",
                    r.against,
                    str(r.ours),
                ]
                for r in table.rivals
            ],
        )
    if table.trees:
        lines += ["", "dynamic trees that promise most here, by the curves and what a wide tree's rounds accepted"]
        lines += _rows(
            ["levels", "width", "budget", "tau", "tokens/s"],
            [
                [str(t.levels), str(t.width), str(t.budget), f"{t.tau:.2f}", f"{t.tokens_per_s:.2f}"]
                for t in table.trees[:SHOWN]
            ],
        )
    return "\n".join(lines) + "\n"


def _rate(answers: Answers) -> float:
    return sum(tokens for tokens, _ in answers) / sum(seconds for _, seconds in answers)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as needed; the first to the left, the others to the right."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
