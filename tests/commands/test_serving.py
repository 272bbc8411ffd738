"""`evaluate` with an engine: what is asked of it, what is made of its answers and counters, and where that is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny_runs import Bench, Ran

from eagle3_lab import load
from eagle3_lab.commands.evaluate import evaluate
from eagle3_lab.engine import Client, Completion, Engine
from eagle3_lab.errors import UserError
from eagle3_lab.formats import loading
from eagle3_lab.pipeline.serving import ServingTable


@dataclass(frozen=True)
class Canned(Client):
    """A server that answers every prompt with its own tokens, and counts three drafts accepted a round."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        return Completion(str(list(prompt)), max_new_tokens)

    def complete_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_a_time: int) -> list[Completion]:
        self.asked.append((len(prompts), at_a_time))
        return super().complete_all(prompts, max_new_tokens, at_a_time)

    def metrics(self) -> dict[str, float]:
        rounds = 10.0 * len(self.asked)
        return {"vllm:spec_decode_num_drafts": rounds, "vllm:spec_decode_num_accepted_tokens": 2.0 * rounds}


class Scripted(Engine):
    """An engine in this process, which reads the head that it is handed."""

    drafts, batch_sizes, needs_head = 3, (1, 4), True

    def __init__(self) -> None:
        self.served: list[str | None] = []
        self.client = Canned("nowhere", "tiny")

    @contextmanager
    def serve(self, target: str, head: Path | None) -> Iterator[Client]:
        self.served.append(None if head is None else loading.read(str(head)).kind)
        yield self.client


def test_target_and_head_are_served_and_the_table_is_kept(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    experiment = load(str(finished[0].yaml))
    experiment.engine = engine = Scripted()
    table = evaluate(experiment, checkpoint_path=finished[0].work() / "draft.ckpt", json=tmp_path / "table.json")
    assert isinstance(table, ServingTable)
    assert engine.served == [None, "EAGLE-3"], "plain first"
    assert engine.client.asked == [(2, 1), (4, 4), (2, 1), (4, 4)], "a batch is full, if need be of repeated prompts"
    assert [(row.batch, row.acceptance_length, row.equal_texts) for row in table.rows] == [(1, 3.0, 1.0), (4, 3.0, 1.0)]
    assert all(row.ratio == row.tokens_per_s / row.plain_tokens_per_s for row in table.rows)
    assert json.loads((tmp_path / "table.json").read_text())["rows"][1]["batch"] == 4
    assert "tokens a round" in table.text()
    logged = [path.name for path in finished[0].folder.glob("artifacts/**/engine*")]
    assert {"engine.txt", "engine.json", "engine_ratio.png"} <= set(logged)


def test_what_cannot_be_served_is_one_line(finished: tuple[Bench, Ran]) -> None:
    bench = finished[0]
    (line,) = bench.run("evaluate", "--engine", "{class_path: VLLM, init_args: {python: none}}").complaints
    assert line == "engine.python: no file none; run `make engine`, or name another environment's"
    nowhere = "http://127.0.0.1:9/v1"
    engine = f"{{class_path: Addresses, init_args: {{plain: {nowhere}, speculating: {nowhere}}}}}"
    (line,) = bench.run("evaluate", "--engine", engine).complaints
    assert line.startswith("engine: http://127.0.0.1:9/v1/models is not reachable (")
    experiment = load(str(bench.yaml))
    experiment.engine, experiment.model = Scripted(), None
    experiment.evaluate = dataclasses.replace(experiment.evaluate, methods={})
    with pytest.raises(UserError, match="engine: Scripted serves the experiment's head, and it has no model; add one"):
        evaluate(experiment)
