"""Rows of the closing table, from the turns that the methods answered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle3_lab.evaluation.answer_log import Place, Turn
from eagle3_lab.evaluation.results import Answered, MethodResult, Overall, method_result, overall_result
from eagle3_lab.evaluation.runner import VANILLA, Contestant

Cells = dict[tuple[str, str], list[Answered]]
"""A method's responses by sampling setting and task."""


def method_rows(
    contestants: Sequence[Contestant], baselines: int, turns: dict[str, list[Turn]], generator: torch.Generator
) -> tuple[list[MethodResult], list[Overall]]:
    """Return a row for each method, task and sampling setting, and, of several tasks, each method's means.

    Args:
        contestants: the methods in the table's order.
        baselines: the number of first contestants that are vanilla decoding, each in its own dtype.
        turns: of each contestant by its name, in one order.
        generator: of the bootstrap.
    """
    cells = {name: _by_cell(own_turns) for name, own_turns in turns.items()}
    places = list(cells[contestants[0].name])
    laws, tasks = list(dict.fromkeys(law for law, _ in places)), list(dict.fromkeys(task for _, task in places))
    plain = [c.name for c in contestants[:baselines]]
    base = {c.name: c.name if c.name in plain else VANILLA for c in contestants}
    rows: list[MethodResult] = []
    overall: list[Overall] = []
    for law in laws:
        fastest = max(plain, key=lambda name: _rate([cell for task in tasks for cell in cells[name][law, task]]))
        own_rows: dict[str, list[MethodResult]] = {c.name: [] for c in contestants}
        for task in tasks:
            for c in contestants:
                sides = (cells[name][law, task] for name in (c.name, base[c.name], fastest))
                row = method_result(
                    VANILLA if c.name in plain else c.name,
                    dtype_name(c.target.dtype),
                    *sides,
                    depth=c.method.levels,
                    lossless=c.method.verifier.lossless,
                    generator=generator,
                    law=law,
                    task=task,
                )
                own_rows[c.name].append(row)
                rows.append(row)
        if len(tasks) > 1:
            for c in contestants:
                names = (c.name, base[c.name], fastest)
                sides = ([cells[name][law, task] for task in tasks] for name in names)
                overall.append(overall_result(own_rows[c.name], *sides, generator=generator))
    return rows, overall


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _by_cell(turns: Sequence[Turn]) -> Cells:
    """Join the turns of each prompt, in their order."""
    prompts: dict[Place, list[Turn]] = {}
    for turn in turns:
        prompts.setdefault(turn.place, []).append(turn)
    cells: Cells = {}
    for place, own_turns in prompts.items():
        answered = Answered(tuple(turn.decoded for turn in own_turns), sum(turn.seconds for turn in own_turns))
        cells.setdefault((place.law, place.task), []).append(answered)
    return cells


def _rate(answered: Sequence[Answered]) -> float:
    return sum(a.tokens for a in answered) / sum(a.seconds for a in answered)
