"""The append log of an evaluation: a killed one continues after the last prompt that all methods had answered.

A process that measures first appends a line with its run; then comes a line for each prompt under each sampling
setting, with the responses and seconds of every method: what is compared was timed by one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import JsonLines
from eagle3_lab.types import Decoded, Round


class Place(NamedTuple):
    """A prompt of a task under named sampling parameters; ``prompt`` is its number in the task, from 0."""

    law: str
    task: str
    prompt: int


@dataclass(frozen=True)
class Turn:
    """The response to one turn: its place, the number of the turn from 0, the tokens, and seconds of wall time."""

    place: Place
    number: int
    decoded: Decoded
    seconds: float


Answers = dict[str, list[Turn]]
"""Each method's responses to one prompt under one sampling setting, by the method's name."""


class AnswerLog:
    """The append log of an evaluation's responses.

    ``known`` has the responses that earlier processes logged, ``run_id`` the run that they belong to; ``processes``
    counts the processes that measured, this one included once `begin` was called.

    Raises: UserError where the file cannot be read, or where one of its records is not a response.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id: str | None = None
        self.known: dict[Place, Answers] = {}
        self.processes = 0
        self._lines = JsonLines(path, "free space, and run again to continue")
        for number, record in enumerate(self._lines.read(), 1):
            self._read(number, record)

    def begin(self, run_id: str) -> None:
        """Log that this process measures for a run. Raises UserError where the file cannot be written."""
        self.processes += 1
        self._lines.append({"run": run_id})

    def add(self, place: Place, answers: Mapping[str, list[Turn]]) -> None:
        """Log all methods' responses to one prompt. Raises UserError where the file cannot be written."""
        plain = {name: [_plain(turn) for turn in turns] for name, turns in answers.items()}
        self._lines.append({"law": place.law, "task": place.task, "prompt": place.prompt, "answers": plain})

    def remove(self) -> None:
        """Remove the file, after the evaluation's results were written elsewhere."""
        self.path.unlink(missing_ok=True)

    def _read(self, number: int, record: Any) -> None:  # noqa: ANN401  checked here
        try:
            if "run" in record:
                self.run_id = record["run"]
                self.processes += 1
                return
            place = Place(record["law"], record["task"], record["prompt"])
            self.known[place] = {
                name: [_turn(place, i, turn) for i, turn in enumerate(turns)]
                for name, turns in record["answers"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self.path}:{number}: is not a response of an evaluation; remove the file to measure from the start"
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


def _turn(place: Place, number: int, record: dict[str, Any]) -> Turn:
    rounds = tuple(Round(*counts) for counts in record["rounds"])
    decoded = Decoded(tuple(record["tokens"]), rounds, record["ended"], dict(record["stages"]))
    return Turn(place, number, decoded, float(record["seconds"]))
