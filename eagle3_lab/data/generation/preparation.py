"""The `prepare:` part of an experiment: prompts from anywhere become the file of conversations that is trained on.

The file is keyed by everything that decides its content, made once, and goes on where a killed run left it. Beside it
lies a manifest: where the prompts come from and under which terms, who answered them and how, what was dropped and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle3_lab.config.keys import chosen
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Report, usable_beginning
from eagle3_lab.data.generation.batched import ARITHMETIC
from eagle3_lab.data.generation.dialogue import TOO_LONG, Answerer, ByTarget, Dialogue, Room, converse, report_of
from eagle3_lab.data.generation.prepared_file import (
    answered,
    as_they_stand,
    manifest_of,
    put,
    read_manifest,
    require_whole,
    tallies,
)
from eagle3_lab.data.generation.server import REQUEST, ByServer, Server
from eagle3_lab.data.overlap import Overlap, measured_on, normalised
from eagle3_lab.data.records import Names, file_hash
from eagle3_lab.data.sources.prompts import Desk, Prompts, Talk, in_order_of, questions
from eagle3_lab.data.tasks import Task
from eagle3_lab.data.turns import Message
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.system.jsonl_log import AppendLog, open_append_log
from eagle3_lab.system.progress import stage
from eagle3_lab.types import COLDEST, require_dtype

VERSION = 2  # of what is made: another one is made anew
SERVED_BY = "served by"  # the journal's step that has the answering model's name


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        temperature: of the sampled ones; 0 is greedy.
        top_p: they are drawn from the likeliest tokens of this joint probability; null: from all.
        greedy_share: of the training conversations, the share that is answered greedily instead.
        max_new_tokens: longer answers are cut there, and end their conversation.
        seed: of the draws, and of which conversations are held out or answered greedily.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.8
    top_p: float | None = None
    greedy_share: float = 0.0
    max_new_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature must be >= 0, got {self.temperature}")
        if 0 < self.temperature < COLDEST:
            raise ValueError(f"sampling.temperature must be 0 or at least {COLDEST:g}, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must lie in (0, 1] (null: off), got {self.top_p}")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"sampling.greedy_share must be a share in [0, 1], got {self.greedy_share}")
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens must be >= 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Preparation:
    """What is asked, and who answers.

    Args:
        prompts: where conversations come from.
        regenerate: true: the target answers every question anew, turn by turn. false: the source's answers are
            trained on as they stand.
        sampling: how answers are drawn.
        server: who answers the training part, by HTTP; null: the target itself.
        held_out: conversations for validation, a number or a share: always answered by the target itself, greedily, in
            its own dtype, because the hit table means something on such text only.
        dtype: of the target while it answers the training part; null: its own.
        rows: conversations answered side by side.
        batch_tokens: rows times the longest row, at most.
        avoid: evaluation sets whose prompts must not be among these; the experiment's own tasks never train anyway.
        limit: at most so many conversations, the first of the source's.

    Raises:
        ValueError: a value outside its range.
    """

    prompts: Prompts
    regenerate: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    server: Server | None = None
    held_out: int | float = 0.05
    dtype: torch.dtype | None = None
    rows: int = 32
    batch_tokens: int = 65536
    avoid: list[Task] = field(default_factory=list)
    limit: int | None = None

    def __post_init__(self) -> None:
        held_out = self.held_out
        if self.dtype is not None:
            require_dtype("prepare.dtype", self.dtype)
        if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
            raise ValueError(f"prepare.held_out must be a number from 0 or a share in [0.0, 1.0), got {held_out}")
        for name, value in (("rows", self.rows), ("batch_tokens", self.batch_tokens), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ValueError(f"prepare.{name} must be >= 1, got {value}")
        if self.server is not None and not self.regenerate:
            raise ValueError("prepare.server must be null where regenerate is false: no training answer is made")

    # ---- identity

    def identity(self, target: Target, chat: Chat) -> dict[str, Any]:
        """What decides the file, as JSON. Raises UserError for a source that is not there."""
        spec = target.spec
        settings: dict[str, Any] = {}
        if spec.settings_hash:
            settings = {"settings_hash": spec.settings_hash, "end_tokens": list(spec.end_tokens)}
        return {
            "version": VERSION,
            "arithmetic": ARITHMETIC,
            "target": {
                "weights_hash": spec.weights_hash,
                "tokenizer_hash": spec.tokenizer_hash,
                "template_hash": chat.template_hash,
                "dtype": str(target.dtype),
                **settings,
            },
            **chosen("Preparation", vars(self), "answers"),
            "prompts": self.prompts.identity(),
            "sampling": chosen("Sampling", vars(self.sampling), "answers"),
            "server": self.server and chosen("Server", vars(self.server), "answers") | {"request": REQUEST},
            "dtype": str(self.dtype or target.dtype),
            "avoid": [asdict(task) | {"path": task.path and file_hash(task.path)} for task in self.avoid],
        }

    def place(self, target: Target, chat: Chat, folder: Path) -> Path:
        """Where the finished file lies, once it is made. Raises UserError as `identity`."""
        text = json.dumps(self.identity(target, chat), sort_keys=True)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"

    # ---- the work

    def make(
        self,
        target: Target,
        chat: Chat,
        folder: Path,
        load: Callable[[torch.dtype], Target],
        budget_s: float | None = None,
    ) -> Path:
        """The file of conversations and the manifest beside it, made if they are not there.

        ``load`` gives the target in another dtype. Raises UserError for a source, a server or a folder that cannot be
        used, for no usable prompts, and where nothing was answered.
        """
        place = self.place(target, chat, folder)
        unfinished = place.with_suffix(".unfinished")
        if place.is_file():
            require_whole(place)
            unfinished.unlink(missing_ok=True)  # a kill behind the last write left it
            self._renew_licences(place)
            return place
        with open_append_log(unfinished) as kept:
            report = Report("prompts")
            talks = self._talks(Desk(target, kept, report), report)
            dialogues = [_dialogue(talk, i) for i, talk in enumerate(talks)]
            held, greedy, drawn = self._divided(dialogues)
            self._answer(target, chat, kept, load, (held, greedy, drawn), budget_s)
            records = [*answered(held, 0.0, "held_out"), *answered(greedy, 0.0, "train")]
            if self.regenerate:
                records += answered(drawn, self.sampling.temperature, "train")
            else:
                records += as_they_stand(talks, drawn)
            answers = report_of(dialogues if self.regenerate else held, len(records))
            if not records:
                shorter = ", or a smaller prepare.sampling.max_new_tokens," if TOO_LONG in answers.dropped else ""
                raise UserError(f"prepare: no conversation was answered ({answers}); other prompts{shorter} are needed")
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            manifest = self._manifest(target, chat, records, text, [report, answers], kept.get(SERVED_BY))
            put(manifest_of(place), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            put(place, text)  # the last: where it is, all is done
            unfinished.unlink(missing_ok=True)
        return place

    def _talks(self, desk: Desk, report: Report) -> list[Talk]:
        """The usable conversations: each question text once, none that the template refuses or that is measured on."""
        overlap, chat = measured_on(self.avoid), Chat(desk.target.tokenizer)
        found: list[Talk] = []
        seen: set[str] = set()
        names = Names()
        with stage("prompts", "conversations") as s:
            for talk in self.prompts.talks(desk):
                s.advance()
                messages, reason = (questions if self.regenerate else usable_beginning)(talk.messages)
                if messages and (refused := chat.refusal(_opening(messages), talk.tools)):
                    report.drop(refused, talk.id)
                    continue
                dropped = reason if not messages else _repeated(messages, seen, overlap)
                if dropped:
                    report.dropped[dropped] += 1
                    continue
                if reason:
                    report.shortened[reason] += 1
                report.kept += 1
                found.append(Talk(names.once(talk.id), messages, talk.source, talk.tools))
                if len(found) == self.limit:  # before another is asked for: a target may have to write it first
                    report.noted[f"prepare.limit {self.limit} reached, what follows was not read"] += 1
                    break
        if not found:
            raise UserError(f"prepare.prompts: nothing usable ({report}); other prompts are needed")
        return found

    def _divided(self, dialogues: Sequence[Dialogue]) -> tuple[list[Dialogue], list[Dialogue], list[Dialogue]]:
        """Held out, greedy, and the rest, by the ids alone: more prompts leave the others where they are."""
        order = in_order_of(self.sampling.seed, [one.id for one in dialogues])
        count = self.held_out if isinstance(self.held_out, int) else round(self.held_out * len(order))
        count = max(count, 1) if self.held_out else 0
        if count >= len(order):
            raise UserError(
                f"prepare.held_out: {self.held_out} of {len(order)} conversations leaves none to train on; a smaller "
                "number or share is needed"
            )
        greedy = round(self.sampling.greedy_share * (len(order) - count)) if self.regenerate else 0
        parts = order[:count], order[count : count + greedy], order[count + greedy :]
        held, often, rest = ([dialogues[i] for i in sorted(part)] for part in parts)
        return held, often, rest

    def _answer(
        self,
        target: Target,
        chat: Chat,
        kept: AppendLog,
        load: Callable[[torch.dtype], Target],
        parts: tuple[list[Dialogue], list[Dialogue], list[Dialogue]],
        budget_s: float | None,
    ) -> None:
        held, greedy, drawn = parts
        sampling = self.sampling
        room = Room(sampling.max_new_tokens, self.rows, self.batch_tokens, target.spec.max_positions)
        asked = sum(turn["role"] == "user" for one in (*held, *greedy, *drawn) for turn in one.asked)
        if not self.regenerate:
            asked = sum(turn["role"] == "user" for one in held for turn in one.asked)
        done = len(kept.values("answers "))
        with stage("answers", "turns", asked - done, budget_s) as s:

            def on_answer(tokens: int) -> None:
                s.advance(1, tokens=tokens)

            converse(held, chat, ByTarget(target, 0.0), room, kept, "answers held out", on_answer)
            load = cache(load)  # once for both parts
            for name, some, temperature in (("greedy", greedy, 0.0), ("drawn", drawn, sampling.temperature)):
                if some and self.regenerate:
                    answerer = self._answerer(target, load, temperature, kept)
                    converse(some, chat, answerer, room, kept, f"answers {name}", on_answer)

    def _answerer(
        self, target: Target, load: Callable[[torch.dtype], Target], temperature: float, kept: AppendLog
    ) -> Answerer:
        law = {"temperature": temperature, "top_p": self.sampling.top_p, "seed": self.sampling.seed}
        if self.server is not None:

            def begun_by(model: str) -> str:
                return kept.step(SERVED_BY, lambda: model)

            return ByServer(self.server, target.spec.end_tokens, **law, begun_by=begun_by)
        other = None if self.dtype == target.dtype else self.dtype
        return ByTarget(target if other is None else load(other), **law)

    def _manifest(
        self,
        target: Target,
        chat: Chat,
        records: Sequence[dict[str, Any]],
        text: str,
        reports: Sequence[Report],
        served_by: str | None,
    ) -> dict[str, Any]:
        licences = self._licences({record["source"] for record in records})
        stages = [report.counts() for report in reports]
        facts: dict[str, Any] = {"target_name": target.spec.name, "licences": licences, "stages": stages}
        if served_by is not None:
            facts["served_by"] = served_by
        return self.identity(target, chat) | tallies(records, text) | facts

    def _licences(self, used: Collection[str]) -> dict[str, str]:
        """The terms of the sources that are used, by their names."""
        return {name: terms for name, terms in sorted(self.prompts.licences().items()) if name in used}

    def _renew_licences(self, place: Path) -> None:
        """Write the terms as they are stated now into the manifest of a finished file: they decide no answer."""
        manifest = read_manifest(place)
        licences = self._licences(manifest.get("by_source", {}))
        if manifest.get("licences") != licences:
            put(manifest_of(place), json.dumps(manifest | {"licences": licences}, indent=2, ensure_ascii=False) + "\n")


def _opening(messages: Sequence[Message]) -> list[Message]:
    """A conversation up to its first question."""
    first = next(i for i, turn in enumerate(messages) if turn["role"] == "user")
    return list(messages[: first + 1])


def _dialogue(talk: Talk, number: int) -> Dialogue:
    """A talk's questions; its own answers, if any, are not among them."""
    asked, _ = questions(talk.messages)
    return Dialogue(talk.id, talk.source, number, asked, talk.tools)


def _repeated(messages: Sequence[Message], seen: set[str], overlap: Overlap) -> str:
    """Why a conversation must not come in, or "": what it asks is remembered."""
    asked = [turn["content"] for turn in messages if turn["role"] == "user"]
    text = "\n".join(map(normalised, asked)).strip() or "\n".join(asked)
    if text in seen:
        return "asks what another asks"
    if found := overlap(asked):
        return f"overlaps with {found}"
    seen.add(text)
    return ""
