"""What an ablation found, written into its folder: ``results.csv``, and a table and figures in ``README.md`` between
two markers. All else in that file, such as question, prediction and verdict, is left as it is."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from eagle3_lab.ablation import decoding, figures, results
from eagle3_lab.ablation.compare import Comparison, Row, comparisons, rows
from eagle3_lab.ablation.figures import Decoded
from eagle3_lab.ablation.plan import Ablation
from eagle3_lab.ablation.results import ALL, READINGS, VISITED, Result
from eagle3_lab.ablation.runs import parent_run, runs_address
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.bootstrap import Interval
from eagle3_lab.system.files import write_text

BEGIN = "<!-- results: written by `report`; changes between these two lines are lost -->"
END = "<!-- end of results -->"

MOST = 8000
"""Characters of a run's text in MLflow, which cuts a longer one anywhere."""

SHOWN_DEPTHS = 3
"""Columns of n-alpha in the table; the CSV file has all."""


def write_page(ablation: Ablation, found: Mapping[str, Result], decoded: Decoded | None) -> str:
    """Write an ablation's table and figures into its folder and return the Markdown between the markers.

    Raises:
        UserError: no result yet, results that cannot be compared, or a folder that cannot be written.
    """
    if not found:
        raise UserError(f"{ablation.name}: no cell is done yet; run `ablate {ablation.folder}` first")
    made = rows(ablation, found)
    drawn = [name for name in ablation.question.figures if name != "speedup" or decoded is not None]
    for name in drawn:
        figures.save(figures.draw(name, made, ablation.against, decoded), ablation.folder / "figures", name)
    write_text(ablation.folder / "results.csv", as_csv(ablation, found))
    text = as_markdown(ablation, made, comparisons(ablation, made), decoded, drawn)
    readme = ablation.folder / "README.md"
    before = readme.read_text("utf-8") if readme.is_file() else f"# {ablation.name}\n\n{ablation.question.question}\n"
    write_text(readme, between_markers(before, text, str(readme)))
    return text


def show(ablation: Ablation) -> str:
    """Put an ablation's table, figures and page beside its runs in MLflow, as files of the parent run, and return how
    to look at them; "" where no cell is done.

    Raises:
        UserError: as `write_page`, or a store that cannot be written.
    """
    found = results.found(ablation)
    if not found:
        return ""
    decoded = decoding.find(ablation, found)
    made = rows(ablation, found)
    drawn = [name for name in ablation.question.figures if name != "speedup" or decoded is not None]
    text = as_markdown(ablation, made, comparisons(ablation, made), decoded, drawn)
    with parent_run(ablation) as run:
        run.log_text(as_csv(ablation, found), "results.csv")
        run.log_text(text, "results.md")
        readme = ablation.folder / "README.md"
        if readme.is_file():
            run.log_text(readme.read_text("utf-8"), "README.md")
        for name in drawn:
            run.log_figure(figures.draw(name, made, ablation.against, decoded), f"figures/{name}.png")
        run.describe(f"{ablation.question.question}\n\n{text.partition('![')[0]}"[:MOST])
        address = runs_address(ablation, run)
    return address + "\n"


def between_markers(before: str, text: str, name: str) -> str:
    """Return a page with ``text`` between its markers, which are put at its end where it has none.

    Raises:
        UserError: one marker without the other, or in the wrong order.
    """
    block = f"{BEGIN}\n\n{text}\n{END}"
    if BEGIN not in before and END not in before:
        return f"{before.rstrip()}\n\n{block}\n"
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest:
        raise UserError(f"{name}: the two lines around the results are damaged; remove both, and they are written anew")
    return f"{head}{block}{tail}"


def as_csv(ablation: Ablation, found: Mapping[str, Result]) -> str:
    """Return a line a cell, with every value and its bounds."""
    lines: list[dict[str, object]] = []
    for cell in ablation.cells:
        if (result := found.get(cell.title)) is None:
            continue
        line: dict[str, object] = {"cell": cell.title, "name": cell.name, "scale": cell.scale, "seed": cell.seed}
        for reading in READINGS:
            line |= _bounded(f"tau_{reading}", result.interval(f"tau_{reading}"))
            for n in range(result.depth):
                line |= _bounded(f"{n}_alpha_{reading}", result.interval(f"n_alpha_{reading}", n))
        line |= {name: value for name, value in result.values.items() if name.endswith("_loss")}
        line |= {name: result.facts.get(name) for name in ("steps", "tokens", "training_seconds", "machine.cpu")}
        lines.append(line | {"commit": result.facts.get("commit"), "key": result.key} | result.settings)
    out = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _bounded(name: str, value: Interval) -> dict[str, float]:
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def as_markdown(
    ablation: Ablation,
    made: Sequence[Row],
    compared: Sequence[Comparison],
    decoded: Decoded | None,
    drawn: Sequence[str],
) -> str:
    """Return table, figures and how to read them."""
    parts = [_cells_table(ablation, made, compared), _reading(ablation, made, compared)]
    if decoded is not None:
        parts.append(_decoded_table(decoded))
    parts += [f"![{name}](figures/{name}.svg)" for name in drawn]
    return "\n\n".join(parts) + "\n"


def _cells_table(ablation: Ablation, made: Sequence[Row], compared: Sequence[Comparison]) -> str:
    scaled = len({row.scale for row in made}) > 1
    head = ["cell", "seeds", "tau [95 %]", "over seeds", "difference", "tau, all anchors", "difference"]
    head += [f"{n}-alpha" for n in range(SHOWN_DEPTHS)] + ["tokens", "minutes"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in made:
        said = {c.reading: c for c in compared if c.label == row.label and _is_base(ablation, c)}
        alphas = [row.n_alpha[ALL][n] if n < len(row.n_alpha[ALL]) else None for n in range(SHOWN_DEPTHS)]
        lines.append(
            [
                row.label,
                str(len(row.results)),
                str(row.tau[VISITED]),
                _spread(row.by_seed[VISITED]),
                said[VISITED].words if VISITED in said else "",
                str(row.tau[ALL]),
                said[ALL].words if ALL in said else "",
                *("-" if value is None else str(value) for value in alphas),
                f"{row.tokens:,}",
                "-" if row.minutes is None else f"{row.minutes:.1f}",
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text if not scaled else f"{text}\n\n{_scale_table(ablation, compared)}"


def _scale_table(ablation: Ablation, compared: Sequence[Comparison]) -> str:
    lines = [["more data", "against", "tau", "tau, all anchors"], ["---", "---", "---:", "---:"]]
    own = [c for c in compared if not _is_base(ablation, c)]
    for label in dict.fromkeys(c.label for c in own):
        said = {c.reading: c for c in own if c.label == label}
        lines.append([label, said[VISITED].against, said[VISITED].words, said[ALL].words])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _is_base(ablation: Ablation, one: Comparison) -> bool:
    """Whether the comparison is with the base cell, and not with the same cell at another scale."""
    return one.against.partition("-x")[0] == ablation.against and one.label.partition("-x")[0] != ablation.against


def _spread(values: Sequence[float]) -> str:
    return "-" if len(values) < 2 else f"{min(values):.2f} to {max(values):.2f}"


def _reading(ablation: Ablation, made: Sequence[Row], compared: Sequence[Comparison]) -> str:
    first = made[0].results[0]
    count = len(compared) // len(READINGS)
    correction = (
        f"The p-values of the {count} comparisons of a column are corrected by Holm's method." if count > 1 else ""
    )
    left = len(ablation.cells) - sum(len(row.results) for row in made)
    missing = f"{left} of {len(ablation.cells)} cells are not done yet." if left else ""
    machines = sorted({str(one.facts.get("machine.cpu")) for row in made for one in row.results})
    sentences = [
        f"Greedy text of {first.facts['target']}: {first.facts['held_out']} held-out conversations,",
        f"{first.depth} drafts deep. tau: tokens a round of a chain decoder (visited anchors), and expected over all",
        "anchors; n-alpha: over all anchors.",
        "Intervals: 95 %, bootstrap over conversations, of the mean over seeds; how far seeds lie apart stands beside.",
        f"Differences are from `{ablation.against}` at the same scale, paired by conversation;",
        '"no difference shown": the interval holds zero, or p is not below 0.05.',
        correction,
        missing,
        f"Minutes are of one training, by its median rate, on {'; '.join(machines)}. Every number: `results.csv`.",
    ]
    return " ".join(filter(None, sentences))


def _decoded_table(decoded: Decoded) -> str:
    rows = decoded["methods"]
    laws = list(dict.fromkeys(row["law"] for row in rows))
    head = ["decoded", *(f"{law}: {what}" for law in laws for what in ("tau", "speed-up"))]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, dtype in dict.fromkeys((row["name"], row["dtype"]) for row in rows):
        own = {row["law"]: row for row in rows if (row["name"], row["dtype"]) == (name, dtype)}
        cells = [str(Interval(**own[law][what])) for law in laws for what in ("tau", "speedup")]
        lines.append([f"{name}, {dtype}", *cells])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{text}\n\n{decoded['setting']}. Speed-up over vanilla in the same dtype, interleaved; intervals over prompts."
    )
