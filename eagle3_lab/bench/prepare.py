"""`bench prepare`: how fast the target answers prompts, and transformers' own batched generate beside it, in turns."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3_lab.backend.prepacked_linear import PackedLinear
from eagle3_lab.bench.costs import timed
from eagle3_lab.bench.train import Series
from eagle3_lab.bench.transformers_generate import CACHES, Batched
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.data.tasks import Task
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.bootstrap import Interval, speedup_interval
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs
from eagle3_lab.system.files import require_place, write_text
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import machine
from eagle3_lab.types import COLDEST

OURS = "ours"
Made = list[tuple[int, ...]]


@dataclass(frozen=True)
class _Side:
    """Somebody who answers all prompts: tokens by prompt."""

    name: str
    answer: Callable[[], Made]


def bench_prepare(
    experiment: Experiment,
    *,
    prompts: str = "package:fresh_prompts",
    count: int = 32,
    rows: int = 32,
    tokens: int = 64,
    ends: bool = False,
    temperature: float = 0.0,
    top_p: float | None = None,
    pairs: int = 5,
    json: Path | None = None,
) -> None:
    """Time the target's answers to prompts as `prepare` makes them, and generate's to the same prompts.

    generate gets the same rows, ids and lengths: batches of prompts sorted by length, padded to the left, with the
    faster of its caches. It is timed with the model as transformers loads it and, where our linear layers are laid out
    beforehand (``target.pack``), with that model too.

    Args:
        experiment: whose target answers.
        prompts: a .jsonl of {"turns": [...]}, whose first turns are asked, or ``package:NAME``.
        count: how many of them.
        rows: answered side by side.
        tokens: of every answer.
        ends: an answer may end before: end tokens count, and a row of ours that ends is filled again.
        temperature: 0 is greedy.
        top_p: as in ``prepare.sampling``.
        pairs: how often all are timed, in turns, after one that warms up.
        json: also write the measurements there, for machines.

    Raises:
        UserError: a number out of range, too few prompts, or a prompt that leaves no room for an answer.
    """
    for name, value in (("count", count), ("rows", rows), ("tokens", tokens), ("pairs", pairs)):
        if value < 1:
            raise UserError(f"--{name}: must be >= 1, got {value}")
    if temperature != 0 and not temperature >= COLDEST:
        raise UserError(f"--temperature: must be 0 or at least {COLDEST:g}, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p: must lie in (0, 1], got {top_p}")
    require_place(json, "--json")
    target = inputs.load_target(experiment)
    ids = _ids(target, prompts, count, tokens)
    batched = Batched(ids, rows, tokens, target.spec.end_tokens if ends else (), temperature, top_p)
    ending = HFTarget(target.model, target.tokenizer, replace(target.spec, end_tokens=batched.ends))
    sides = [_Side(OURS, lambda: _ours(ending, batched)), *_theirs(experiment, target, batched)]
    found = _timed(sides, target.device, pairs) | {
        "shape": {"prompts": len(ids), "prompt_tokens": sum(map(len, ids)), "longest": max(map(len, ids))}
        | {"rows": rows, "tokens": tokens, "ends": ends, "temperature": temperature, "top_p": top_p}
        | {"target": target.spec.name, "dtype": str(target.dtype), "threads": torch.get_num_threads()},
        "machine": machine(),
    }
    print(as_text(found), end="")
    if json is not None:
        write_text(json, json_module.dumps(found, indent=2) + "\n")


def _ids(target: HFTarget, prompts: str, count: int, tokens: int) -> list[list[int]]:
    asked = Task("prompts", prompts, count).prompts()
    if len(asked) < count:
        raise UserError(f"--count: {count}, but {prompts} has {len(asked)} prompts; a smaller number")
    chat = Chat(target.tokenizer)
    ids = [chat.prompt_ids(one.messages(), one.tools) for one in asked]
    if (longest := max(map(len, ids))) + tokens > target.spec.max_positions:
        raise UserError(
            f"--tokens: {tokens} behind a prompt of {longest} tokens, but {target.spec.name} has room for "
            f"{target.spec.max_positions}"
        )
    return ids


def _ours(target: HFTarget, asked: Batched) -> Made:
    made = answers(
        target,
        asked.prompts,
        temperature=asked.temperature,
        max_new_tokens=asked.tokens,
        rows=asked.rows,
        top_p=asked.top_p,
    )
    return [one.tokens for one in sorted(made, key=lambda one: one.index)]


def _theirs(experiment: Experiment, target: HFTarget, asked: Batched) -> list[_Side]:
    """generate with each model, each with the cache that was faster in the warm-up."""
    packed = any(isinstance(module, PackedLinear) for module in target.model.modules())
    plain = replace(experiment.target, pack=False, probe=False).load() if packed else target
    named = {"transformers": plain} | ({"transformers, our packed layers": target} if packed else {})
    sides = []
    for name, one in named.items():
        timings = {}
        for cache in CACHES:
            asked.generate(one.model, cache, 2)
            timings[cache] = timed(lambda one=one, cache=cache: asked.generate(one.model, cache), target.device)[1]
        cache = min(timings, key=lambda cache: timings[cache])
        sides.append(_Side(f"{name}, {cache} cache", lambda one=one, cache=cache: asked.generate(one.model, cache)))
    return sides


def _timed(sides: Sequence[_Side], device: torch.device, pairs: int) -> dict[str, Any]:
    """Everybody in turn, in an order that rotates; the first turn warms up."""
    series: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    made: dict[str, Made] = {}
    with stage("bench", "turns", 1 + pairs) as s:
        for turn in range(1 + pairs):
            for side in (*sides[turn % len(sides) :], *sides[: turn % len(sides)]):
                began = time.process_time()
                made[side.name], seconds = timed(side.answer, device)
                if turn:
                    series[side.name].append((seconds, time.process_time() - began))
            s.advance()
    return {"sides": {side.name: _report(side.name, series, made) for side in sides}}


def _report(name: str, series: dict[str, list[tuple[float, float]]], made: dict[str, Made]) -> dict[str, Any]:
    tokens = {one: sum(map(len, said)) for one, said in made.items()}
    wall, cpu = zip(*series[name], strict=True)
    told = Series(wall, cpu, tokens[name]).report() | {"tokens": tokens[name]}
    if name == OURS:
        return told
    own, other = ([tokens[one]] * len(wall) for one in (OURS, name))
    draw = torch.Generator().manual_seed(0)
    mine = [s for s, _ in series[OURS]], [c for _, c in series[OURS]]
    faster = speedup_interval(own, mine[0], other, wall, draw)
    pairs = zip(made[OURS], made[name], strict=True)
    return told | {
        "ours_times_as_fast": asdict(faster),
        "ours_times_as_fast_by_cpu_seconds": asdict(speedup_interval(own, mine[1], other, cpu, draw)),
        "equal_answers": sum(a == b for a, b in pairs) / len(made[name]),
    }


def as_text(found: dict[str, Any]) -> str:
    """The measurements for a reader."""
    shape = found["shape"]
    how = "greedy" if shape["temperature"] == 0 else f"temperature {shape['temperature']}, top-p {shape['top_p']}"
    what = (
        f"{shape['target']} in {shape['dtype'].removeprefix('torch.')}, {shape['threads']} threads: {shape['prompts']} "
        f"prompts of {shape['prompt_tokens'] / shape['prompts']:.0f} tokens (longest {shape['longest']}), "
        f"{shape['rows']} rows, {'at most ' if shape['ends'] else ''}{shape['tokens']} tokens an answer, {how}"
    )
    lines = [what]
    for name, side in found["sides"].items():
        low, high = side["seconds_quartiles"]
        told = (
            f"{name}: {side['tokens_per_s']:.1f} tokens/s ({side['tokens']} tokens in {side['seconds']:.2f} s, median "
            f"of {len(side['all_seconds'])}; quartiles {low:.2f} to {high:.2f})"
        )
        if name != OURS:
            told += (
                f"; ours is {Interval(**side['ours_times_as_fast'])} times as fast, by CPU seconds "
                f"{Interval(**side['ours_times_as_fast_by_cpu_seconds'])}; {side['equal_answers']:.0%} of answers equal"
            )
        lines.append(told)
    return "\n".join(lines) + "\n"
