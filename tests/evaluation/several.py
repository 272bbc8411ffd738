"""A closing table over several tasks and laws, from answers made by hand: for its shapes and figures."""

from __future__ import annotations

import torch

from eagle3_lab.evaluation.results import Answered, ClosingTable, MethodResult, Overall, method_result, overall_result
from eagle3_lab.types import Decoded, Round

LAWS, TASKS = ("T0", "T1"), ("chat", "sums")


def said(accepted: list[int], depth: int, seconds: float, *, loops: bool = False) -> Answered:
    """A prompt of one turn, whose rounds accept so many drafts, nothing trimmed; ``loops``: of one token, repeated."""
    rounds = tuple(Round(min(a + 1, depth), a, a + 1) for a in accepted)
    length = 1 + sum(r.emitted for r in rounds)
    stages = {"prefill": 0.1 * seconds, "draft": 0.2 * seconds, "verify": 0.6 * seconds, "host": 0.1 * seconds}
    return Answered((Decoded((7,) * length if loops else tuple(range(length)), rounds, "end", stages),), seconds)


def vanilla(seconds: float) -> list[Answered]:
    return [said([0] * 15, 0, seconds), said([0] * 15, 0, 1.5 * seconds, loops=True)]


def lookup(seconds: float, hits: int) -> list[Answered]:
    """Of two prompts the second loops, and takes three drafts in every round."""
    return [said([hits, 0, 2, 0], 3, seconds), said([3] * 4, 3, seconds, loops=True)]


def several(*, laws: tuple[str, ...] = LAWS, tasks: tuple[str, ...] = TASKS, drafting: bool = True) -> ClosingTable:
    """Vanilla in two dtypes and, ``drafting``, a method of depth 3: on the first task twice as fast under the first
    law, on each later task and law slower."""
    draw = torch.Generator().manual_seed(0)
    rows: list[MethodResult] = []
    overall: list[Overall] = []
    for i, law in enumerate(laws):
        same, fastest = [vanilla(4.0 + j) for j in range(len(tasks))], [vanilla(2.0) for _ in tasks]
        made = [lookup(2.5 + i + j, hits=3 - j) for j in range(len(tasks))]
        lines = [("vanilla", "float32", same, same, 0), ("vanilla", "bfloat16", fastest, fastest, 0)]
        lines += [("lookup", "float32", made, same, 3)] if drafting else []
        for name, dtype, own, base, depth in lines:
            every = zip(tasks, own, base, fastest, strict=True)
            found = [method_result(name, dtype, a, b, c, depth, draw, law=law, task=task) for task, a, b, c in every]
            rows += found
            overall += [overall_result(found, own, base, fastest, draw)] if len(tasks) > 1 else []
    return ClosingTable("tiny target", tuple(rows), None, "0abc", "none", "mlflow ui", "#/x", tuple(overall))
