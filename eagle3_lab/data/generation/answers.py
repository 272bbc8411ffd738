"""Fresh answers of the target, made once and kept: part of an experiment's training text.

The file is keyed by everything that decides its content (target, template, prompts, sampling), written answer by
answer, and goes on where a killed run left it: what was answered is kept, the rest comes out as it would have.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_lab.config.keys import chosen
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import ARITHMETIC, Answer, answers
from eagle3_lab.data.records import file_hash
from eagle3_lab.data.repetition import is_looping
from eagle3_lab.data.tasks import Prompt, Task
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.system.files import file_lock, write_atomic
from eagle3_lab.types import COLDEST


@dataclass(frozen=True)
class Answers:
    """Prompts that the target answers before training, one answer to each first turn.

    Args:
        prompts: a .jsonl of {"turns": [...]}, or ``package:fresh_prompts``.
        limit: only the first so many prompts.
        temperature: 0 is greedy.
        max_new_tokens: longer answers are cut there.
        rows: prompts answered side by side.
        seed: of the draws.
    """

    prompts: str = "package:fresh_prompts"
    limit: int | None = None
    temperature: float = 0.8
    max_new_tokens: int = 256
    rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"answers.temperature must be >= 0, got {self.temperature}")
        if 0 < self.temperature < COLDEST:
            raise ValueError(f"answers.temperature must be 0 or at least {COLDEST:g}, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"answers.max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.rows < 1:
            raise ValueError(f"answers.rows must be >= 1, got {self.rows}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"answers.limit must be >= 1 or null, got {self.limit}")

    def questions(self) -> list[Prompt]:
        """The prompts. Raises UserError for a broken or missing file."""
        return Task("fresh", self.prompts, self.limit).prompts()

    def key(self, target: Target, chat: Chat) -> str:
        """Identity of the answers: the same key, the same file."""
        spec = target.spec
        parts = [spec.weights_hash, spec.tokenizer_hash, chat.template_hash, str(target.dtype), str(ARITHMETIC)]
        parts += [spec.settings_hash, str(spec.end_tokens)] if spec.settings_hash else []
        options = chosen("Answers", vars(self), "answers") | {"prompts": file_hash(self.prompts)}
        parts.append(json.dumps(options, sort_keys=True))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def place(self, target: Target, chat: Chat, folder: Path) -> Path:
        """Where the finished file lies, once it is made."""
        return folder / f"{self.key(target, chat)}.jsonl"

    def make(
        self, target: Target, chat: Chat, folder: Path, on_answer: Callable[[int], None] = lambda tokens: None
    ) -> Path:
        """The file of answers, made if it is not there. ``on_answer`` is told each answer's length in tokens.

        Raises:
            UserError: the folder cannot be written, a prompt is too long for the target, or another process makes the
                same file.
        """
        place = self.place(target, chat, folder)
        if place.is_file():
            return place
        questions = self.questions()
        ids = [chat.prompt_ids(q.messages(), q.tools) for q in questions]
        for question, prompt in zip(questions, ids, strict=True):
            if len(prompt) + self.max_new_tokens > target.spec.max_positions:
                raise UserError(
                    f"{self.prompts}: prompt {question.id} has {len(prompt)} tokens; with answers.max_new_tokens "
                    f"{self.max_new_tokens} {target.spec.name} has room for {target.spec.max_positions}"
                )
        busy = f"{place}: is being written by another process; wait for its end, or end it and run this again"
        lock = place.with_suffix(".lock")
        try:
            with file_lock(lock, busy):
                if not place.is_file():  # another process may have finished it between our look and our lock
                    self._write(target, chat, questions, ids, place, on_answer)
            lock.unlink(missing_ok=True)  # whoever takes it from now on finds the file and writes nothing
        except OSError as error:
            raise UserError(
                f"{folder}: answers cannot be written ({error.strerror}); free space or set EAGLE3_LAB_CACHE"
            ) from None
        return place

    def _write(
        self,
        target: Target,
        chat: Chat,
        questions: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
        place: Path,
        on_answer: Callable[[int], None],
    ) -> None:
        """Make the file, behind what a killed run left of it. Raises OSError where that cannot be written."""
        unfinished = place.with_suffix(".unfinished")
        known = _finished(unfinished)
        made = answers(
            target,
            ids,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            rows=self.rows,
            seed=self.seed,
            known={i: known[question.id]["tokens"] for i, question in enumerate(questions) if question.id in known},
        )
        with unfinished.open("a", encoding="utf-8") as file:
            for answer in made:
                record = _record(questions[answer.index], ids[answer.index], answer, self.temperature, chat)
                record["tokens"] = len(answer.tokens)  # in the unfinished file alone
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                on_answer(len(answer.tokens))
        whole = _finished(unfinished)
        ordered = [whole[q.id] for q in questions]
        for record in ordered:
            del record["tokens"]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in ordered)
        write_atomic(place, text.encode())
        unfinished.unlink()


def _record(question: Prompt, prompt: Sequence[int], answer: Answer, temperature: float, chat: Chat) -> dict:
    tokens, asked = answer.tokens, question.messages()
    text = chat.text_behind(prompt, tokens if answer.cut else tokens[:-1])
    record = {
        "id": question.id,
        "source": "fresh",
        "split": "train",
        "temperature": temperature,
        "cut": answer.cut,
        "looping": is_looping(tokens),
        "messages": [*asked, {"role": "assistant", "content": text}],
    }
    if chat.taught(asked, text, cut=answer.cut, tools=question.tools) != list(tokens):
        record["exact"] = False
    return record | ({"tools": list(question.tools)} if question.tools else {})


def _finished(unfinished: Path) -> dict[str, dict]:
    """Whole lines of an interrupted file, by id; what a kill left behind them is taken from the file."""
    if not unfinished.is_file():
        return {}
    found: dict[str, dict] = {}
    size = 0
    for line in unfinished.read_bytes().split(b"\n")[:-1]:  # not splitlines: an answer may hold rarer line ends
        try:
            record = json.loads(line)
        except ValueError:
            break
        found[record["id"]] = record
        size += len(line) + 1
    os.truncate(unfinished, size)
    return found
