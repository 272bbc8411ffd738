"""Answers of an evaluation, kept as they are made: one that is killed goes on after the last prompt that all answered.

A file of JSON lines. A process that measures begins with a line of its own; then comes a line for each prompt under
each law, with every contestant's answers and seconds: what is compared was timed by one process. A line that a kill
left unfinished is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_lab.errors import UserError
from eagle3_lab.types import Decoded, Round


class Place(NamedTuple):
    """A prompt of a task under a law: both by name, the prompt by its number in the task, counted from 0."""

    law: str
    task: str
    prompt: int


@dataclass(frozen=True)
class Turn:
    """One answered turn: where, what was decoded, and how long decoding took, in seconds of wall time."""

    place: Place
    number: int
    decoded: Decoded
    seconds: float


Answers = dict[str, list[Turn]]
"""What every contestant, by name, answered to one prompt under one law."""


class Journal:
    """The answers in one file, those of earlier processes read back.

    ``known`` holds the answers of earlier processes, ``run_id`` the run that the first of them began; ``processes`` how
    many measured, this one included once it has begun.

    Raises: UserError where the file cannot be read, or a whole line of it is no answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id: str | None = None
        self.known: dict[Place, Answers] = {}
        self.processes = 0
        try:
            lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
            for number, line in enumerate(lines[:-1], 1):
                self._read(number, line)
            if lines[-1]:
                os.truncate(path, path.stat().st_size - len(lines[-1]))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); remove it to measure from the start") from None

    def begin(self, run_id: str) -> None:
        """This process measures for that run. Raises UserError where that cannot be written."""
        self.processes += 1
        self._append({"run": run_id})

    def add(self, place: Place, answers: Mapping[str, list[Turn]]) -> None:
        """Keep all contestants' answers to one prompt. Raises UserError where they cannot be written."""
        plain = {name: [_plain(turn) for turn in turns] for name, turns in answers.items()}
        self._append({"law": place.law, "task": place.task, "prompt": place.prompt, "answers": plain})

    def remove(self) -> None:
        """The evaluation is over and its results are kept elsewhere."""
        self.path.unlink(missing_ok=True)

    def _append(self, record: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path}: answers cannot be written ({error.strerror}); make room, and run again to go on"
            ) from None

    def _read(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            if "run" in record:
                self.run_id = record["run"]
                self.processes += 1
                return
            place = Place(record["law"], record["task"], record["prompt"])
            self.known[place] = {
                name: [_turn(place, i, told) for i, told in enumerate(turns)]
                for name, turns in record["answers"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self.path}:{number}: no answer of an evaluation; remove the file to measure from the start"
            ) from None


def _plain(turn: Turn) -> dict[str, Any]:
    decoded = turn.decoded
    return {
        "tokens": decoded.tokens,
        "rounds": [(r.judged, r.accepted, r.emitted, r.overrun) for r in decoded.rounds],
        "ended": decoded.ended,
        "stages": decoded.seconds,
        "seconds": turn.seconds,
    }


def _turn(place: Place, number: int, told: dict[str, Any]) -> Turn:
    rounds = tuple(Round(*counts) for counts in told["rounds"])
    decoded = Decoded(tuple(told["tokens"]), rounds, told["ended"], dict(told["stages"]))
    return Turn(place, number, decoded, float(told["seconds"]))
