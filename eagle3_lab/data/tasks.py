"""What is measured on: the paper's five tasks, any local file of prompts, or the held-out conversations.

Answers are never judged and never run: HumanEval's are code by a language model, and acceptance does not depend on
whether they are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eagle3_lab.data.records import Names, name_of, records, say, whole_characters
from eagle3_lab.data.turns import UNUSABLE, Message, Tools, definitions, with_record
from eagle3_lab.errors import UserError, near

HELD_OUT = "held_out"


@dataclass(frozen=True)
class Prompt:
    """User turns to be answered one after another. ``id`` is unique within its task."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    system: str | None = None
    tools: Tools = ()

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The conversation up to the first turn that ``answers`` do not answer yet."""
        said: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class HubSet:
    """A public set on the Hugging Face hub, and which of its columns become the turns."""

    name: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    before: str = ""
    category: str = ""

    def turns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """One turn of the joined non-empty columns, or several if the column holds a list."""
        first = row[self.columns[0]]
        if isinstance(first, list):
            return tuple(first)
        return (self.before + "\n".join(row[column] for column in self.columns if row[column]),)


# EAGLE's papers measure 80 prompts of each: all of MT-bench, and picks of the others that these sets do not mark. Give
# those picks as local files to compare with their numbers. `before` is what EAGLE puts before a prompt
# (SafeAILab/EAGLE cb7e084, eagle/data/*/question.jsonl).
TASKS = {
    "mt_bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",)),
    "humaneval": HubSet(
        "openai/openai_humaneval", None, "test", ("prompt",), "Complete the code I provided.\n\n", "code"
    ),
    "gsm8k": HubSet("openai/gsm8k", "main", "test", ("question",), category="math"),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", ("instruction", "input"), category="instruction"),
    "cnn_dm": HubSet("abisee/cnn_dailymail", "3.0.0", "test", ("article",), "Summarize: ", "summarization"),
}


@dataclass(frozen=True)
class Task:
    """Prompts by name.

    Args:
        name: mt_bench, humaneval, gsm8k, alpaca or cnn_dm; ``held_out`` for the data's held-out conversations; or, with
            a path, any name.
        path: a local .jsonl of {"turns": [str, ...], "question_id"?, "category"?, "system"?, "tools"?} instead of the
            hub's set.
        limit: only the first so many prompts.

    Raises:
        UserError: an unknown name without a path.
        ValueError: a limit below 1, or an empty path.
    """

    name: str
    path: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise ValueError(f"path must name a .jsonl, .jsonl.gz or .json file, or be null, got {self.path!r}")
        if self.path is None and self.name not in TASKS and self.name != HELD_OUT:
            raise UserError(f"task: unknown name {self.name!r} without a path{near(self.name, [*TASKS, HELD_OUT])}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")

    def prompts(self, held_out: Sequence[Prompt] | None = None) -> list[Prompt]:
        """The prompts, in the file's or the hub's order. ``held_out``: those of the data, for the task of that name.

        Raises:
            UserError: a broken file, a set that cannot be loaded, no prompts, or held-out ones that were not given.
        """
        if self.path is not None:
            source: Iterator[Prompt] = _from_file(self.path)
        elif self.name == HELD_OUT:
            if held_out is None:
                raise UserError("task held_out: needs the experiment's data section, whose held-out prompts it asks")
            source = iter(held_out)
        else:
            source = _from_hub(self.name, TASKS[self.name])
        found = list(islice(source, self.limit))
        if not found:
            here = self.name == HELD_OUT and self.path is None
            raise UserError(
                f"task {self.name}: no prompts" + ("; the data card says what was held out" if here else "")
            )
        return found


def _from_file(path: str) -> Iterator[Prompt]:
    seen: set[str] = set()
    names = Names()
    for number, (place, record) in enumerate(records(path)):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns:
            fault = f"turns is {say(turns)}" if "turns" in record else "no turns"
            raise UserError(f"{place}: {fault}; a list of the user's turns is needed")
        for i, turn in enumerate(turns):
            if not isinstance(turn, str) or not turn.strip() or not whole_characters(turn):
                raise UserError(f"{place}: turns[{i}] is {say(turn)}; a text is needed")
        name = name_of([record.get("question_id"), record.get("id")], "")
        if name in seen:
            raise UserError(f"{place}: question_id {name} a second time; ids must differ within a file")
        seen |= {name} - {""}
        beside = with_record(record, [])
        if beside and UNUSABLE in beside[0]:
            raise UserError(
                f"{place}: {beside[0][UNUSABLE]}; a prompt's system is a text, its tools are a list of objects"
            )
        system = beside[0]["content"] if beside else None
        name, tools = names.once(name or str(number)), definitions(record)[0]
        yield Prompt(name, tuple(turns), str(record.get("category") or ""), system, tools)


def _from_hub(task: str, source: HubSet) -> Iterator[Prompt]:
    what = f"task {task}: the hub's {source.name} cannot be loaded"
    otherwise = 'give a local file as path, one {"turns": [...]} a line'
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise UserError(f"{what}: the package datasets is not installed; {otherwise}") from None
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(f"{what} ({' '.join(str(error).split())[:160]}); {otherwise}") from None
    for number, row in enumerate(rows):
        assert isinstance(row, dict)
        yield Prompt(str(number), source.turns(row), source.category or str(row.get("category") or ""))
