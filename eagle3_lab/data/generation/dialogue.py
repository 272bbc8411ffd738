"""Conversations answered turn by turn, in batches that never change: killed anywhere, the same file comes out.

A batch is fixed by what was said before it: the prompts of one turn in order of length, as many as fit. Every answer is
written down as it ends, and never made again. What the target writes depends, in the last bits, on the shapes of the
forwards that write it; so a batch that a kill left unfinished goes on with the same prompts in the same rows, the ones
already answered holding theirs. Who answers is another part's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eagle3_lab.data.chat import Chat, Refused
from eagle3_lab.data.conversations import Report
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.data.repetition import is_looping
from eagle3_lab.data.turns import Message, Tools
from eagle3_lab.interfaces import Target
from eagle3_lab.system.jsonl_log import AppendLog

WAVES = 4  # prompts of a batch, per row: as one row's answer ends, the next prompt takes its place
TOO_LONG = "longer than the target reads"


@dataclass(frozen=True)
class Said:
    """One answer: its text; how many tokens it has, its end included; whether the limit cut it; whether training on its
    text teaches the tokens that were written; whether it loops."""

    text: str
    tokens: int
    cut: bool
    exact: bool
    looping: bool


@dataclass(frozen=True)
class Written:
    """One answer as it comes from whoever wrote it: token ids, the end included unless it was ``cut``; or, where those
    are not told, its ``text`` alone."""

    tokens: tuple[int, ...] | None
    cut: bool
    text: str = ""


@dataclass(frozen=True)
class Room:
    """What answers may take.

    ``max_new_tokens`` an answer; ``rows`` side by side, and at most ``batch_tokens`` in rows x longest row;
    ``max_positions`` of the target.
    """

    max_new_tokens: int
    rows: int
    batch_tokens: int
    max_positions: int

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether an answer of full length fits behind the prompt."""
        return len(prompt) + self.max_new_tokens <= self.max_positions

    def rows_for(self, longest: int) -> int:
        """Prompts of this length that stand side by side."""
        return max(1, min(self.rows, self.batch_tokens // (longest + self.max_new_tokens)))


class Answerer(ABC):
    """Who answers prompts of token ids, and how it draws."""

    temperature: float

    @abstractmethod
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        turn: int,
        rows: int,
        room: Room,
        known: Mapping[int, Said],
    ) -> Iterator[tuple[int, Written]]:
        """One answer a prompt, with the prompt's index, as each ends; none where one is ``known`` by the same index.
        ``numbers``: of the prompts' conversations, for their seeds.

        Raises:
            UserError: an answer that cannot be had.
        """


@dataclass
class Dialogue:
    """One conversation while it is answered: its questions, and what was said so far. ``stopped``: why it ended before
    its last question; ``refused``: the template is why."""

    id: str
    source: str
    number: int
    asked: tuple[Message, ...]
    tools: Tools = ()
    messages: list[Message] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    stopped: str = ""
    refused: bool = False

    def ask(self) -> bool:
        """Put the next question, if there is one and the conversation goes on."""
        left = self.asked[len(self.messages) - len(self.said) :]
        if self.stopped or not left:
            return False
        system = left[0]["role"] == "system"
        self.messages += left[: 2 if system else 1]
        return True

    def hear(self, said: Said) -> None:
        """Take an answer; an empty one takes its question back, and a cut one is the last."""
        if not said.text.strip():
            self.stop("empty answer")
            return
        self.messages.append({"role": "assistant", "content": said.text})
        self.said.append(said)
        if said.cut and len(self.said) < sum(turn["role"] == "user" for turn in self.asked):
            self.stopped = "answer cut at max_new_tokens"

    def stop(self, why: str) -> None:
        """End the conversation before the question that was just put."""
        self.messages.pop()
        self.stopped = why


def converse(
    dialogues: Sequence[Dialogue],
    chat: Chat,
    answerer: Answerer,
    room: Room,
    journal: AppendLog,
    name: str,
    on_answer: Callable[[int], None],
) -> None:
    """Answer every question of every dialogue. ``name`` is the job's in the journal; ``on_answer`` is told how many
    tokens each answer has that is made now.

    A conversation that the template refuses ends before the question with which it does.

    Raises:
        UserError: an answer that cannot be had.
    """
    turn = 0
    while going := [one for one in dialogues if one.ask()]:
        ids = [_prompt(one, chat, room) for one in going]
        fitting = [i for i, one in enumerate(going) if not one.stopped]
        fitting.sort(key=lambda i: (len(ids[i]), going[i].number))
        for number, batch in enumerate(_batches(fitting, ids, room)):
            prompts, numbers = [ids[i] for i in batch], [going[i].number for i in batch]
            names = [f"{name} {turn} {number} {place}" for place in range(len(batch))]
            said = {place: Said(*found) for place, one in enumerate(names) if (found := journal.get(one))}
            rows = room.rows_for(max(map(len, prompts)))
            left = answerer.answer(prompts, numbers, turn, rows, room, dict(said)) if len(said) < len(batch) else ()
            for place, written in left:
                one = read_back(going[batch[place]], prompts[place], written, chat)
                journal.put(names[place], [one.text, one.tokens, one.cut, one.exact, one.looping])
                said[place] = one
                on_answer(one.tokens)
            for place, i in enumerate(batch):
                going[i].hear(said[place])
        turn += 1


def _prompt(dialogue: Dialogue, chat: Chat, room: Room) -> list[int]:
    """The ids of the question that was just put; none where it cannot be put, and the dialogue says why."""
    try:
        prompt = chat.prompt_ids(dialogue.messages, dialogue.tools)
    except Refused as error:
        dialogue.stop(error.reason)
        dialogue.refused = True
        return []
    if not room.fits(prompt):
        dialogue.stop(TOO_LONG)
    return prompt


def read_back(dialogue: Dialogue, prompt: Sequence[int], written: Written, chat: Chat) -> Said:
    """An answer as text, compared with what training on that text will teach behind these messages.

    Where only the text is known, it is exact unless the template or the tokenizer changes it.
    """
    tokens = written.tokens
    text = (
        chat.content_of(written.text)
        if tokens is None
        else chat.text_behind(prompt, tokens if written.cut else tokens[:-1])
    )
    taught = chat.taught(dialogue.messages, text, cut=written.cut, tools=dialogue.tools) if text.strip() else None
    if tokens is not None:
        return Said(text, len(tokens), written.cut, taught == list(tokens), is_looping(tokens))
    if taught is None:
        ids = chat.ids_behind(text)
        return Said(text, len(ids) + (not written.cut), written.cut, False, is_looping(ids))
    kept = taught if written.cut else taught[:-1]
    return Said(text, len(taught), written.cut, chat.text_behind(prompt, kept) == text, is_looping(kept))


def _batches(order: Sequence[int], ids: Sequence[Sequence[int]], room: Room) -> list[list[int]]:
    """Prompts in order of length, cut into batches of WAVES times as many as fit side by side.

    Longest first, so that what does not fit into memory is told at once.
    """
    found: list[list[int]] = []
    left = list(order)
    while left:
        size = WAVES * room.rows_for(len(ids[left[-1]]))
        found.append(left[-size:])
        del left[-size:]
    return found


class ByTarget(Answerer):
    """The target itself, by its own forward passes."""

    def __init__(self, target: Target, temperature: float, top_p: float | None = None, seed: int = 0) -> None:
        self.target = target
        self.temperature, self.top_p, self.seed = temperature, top_p, seed

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        turn: int,
        rows: int,
        room: Room,
        known: Mapping[int, Said],
    ) -> Iterator[tuple[int, Written]]:
        made = answers(
            self.target,
            prompts,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=room.max_new_tokens,
            rows=rows,
            seed=self.seed,
            turn=turn,
            numbers=numbers,
            known={i: said.tokens for i, said in known.items()},
        )
        for one in made:
            yield one.index, Written(one.tokens, one.cut)


def report_of(dialogues: Sequence[Dialogue], kept: int) -> Report:
    """Why conversations were shortened and dropped; ``kept``: how many were not dropped."""
    report = Report("answers", kept)
    for one in dialogues:
        if one.stopped and one.said:
            report.shortened[one.stopped] += 1
        elif one.refused:
            report.drop(one.stopped, one.id)
        elif not one.said:
            report.dropped[one.stopped] += 1
    return report
