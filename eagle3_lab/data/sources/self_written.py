"""Prompts that the target writes itself, from the opening of its own chat template.

An instruct model that is given the beginning of a user's turn writes one: text of the kind it was tuned on, without any
data set.

Source: the idea is Magpie's (arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from eagle3_lab import seeds
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.data.overlap import opening_words, word_count
from eagle3_lab.data.repetition import is_looping
from eagle3_lab.data.sources.prompts import Desk, Prompts, Talk
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.types import COLDEST

SAME_BEGINNING = 8  # words: turns that begin alike are one turn


class SelfWritten(Prompts):
    """First user turns by the target, filtered and without repeats: whole, of sensible length, printable, without
    markers of the template, not looping, no two with the same first eight words.

    Args:
        count: how many.
        temperature: above 0, or all turns would be one.
        top_p: the likeliest tokens of this joint probability are drawn from; null: all.
        max_tokens: longer turns are thrown away.
        min_words, max_words: shorter and longer ones too, as `overlap.word_count` counts.
        rows: turns written side by side.
        attempts: turns written at most, for each one wanted; so many batches in any case.
        seed: of the draws.
        licence: the terms of the texts: those of the target's output.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        count: int,
        temperature: float = 0.8,
        top_p: float | None = None,
        max_tokens: int = 120,
        min_words: int = 4,
        max_words: int = 100,
        rows: int = 32,
        attempts: int = 10,
        seed: int = 0,
        licence: str = "written by the target: the terms of its output",
    ) -> None:
        for name, value in (("count", count), ("max_tokens", max_tokens), ("rows", rows), ("attempts", attempts)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not temperature >= COLDEST:
            raise ValueError(f"temperature must be >= {COLDEST:g}, got {temperature}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (null: off), got {top_p}")
        if not 1 <= min_words <= max_words:
            raise ValueError(f"min_words must be within 1..max_words, {max_words}, got {min_words}")
        self.count, self.temperature, self.top_p, self.max_tokens = count, temperature, top_p, max_tokens
        self.min_words, self.max_words = min_words, max_words
        self.rows, self.attempts, self.seed, self.licence = rows, attempts, seed, licence

    def talks(self, desk: Desk) -> Iterator[Talk]:
        opening = user_opening(desk.target)
        if len(opening) + self.max_tokens > desk.target.spec.max_positions:
            raise UserError(
                f"SelfWritten.max_tokens: {self.max_tokens} behind an opening of {len(opening)} tokens, but "
                f"{desk.target.spec.name} has room for {desk.target.spec.max_positions}"
            )
        markers = Chat(desk.target.tokenizer).markers
        seen: set[str] = set()
        job = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]
        number = batch = 0
        while number < self.count:
            if batch * self.rows >= self.attempts * max(self.count, self.rows):
                raise UserError(
                    f"SelfWritten.count: of {batch * self.rows} turns that the target wrote only {number} can be used, "
                    f"{self.count} are wanted; a smaller count, more attempts, or prompts from elsewhere are needed"
                )
            write = partial(self._written, desk.target, opening, batch)
            texts = desk.journal.step(f"self-written {job} {batch}", write)
            if len(texts) < self.rows:
                desk.report.dropped["self-written turn that is cut or loops"] += self.rows - len(texts)
            for text in texts:
                beginning = opening_words(text, SAME_BEGINNING)
                if number == self.count:
                    desk.report.left_out["self-written turn beyond SelfWritten.count"] += 1
                elif not self._usable(text, markers):
                    desk.report.dropped["self-written turn that is too short, too long or not printable"] += 1
                elif beginning in seen:
                    desk.report.dropped["self-written turn that begins as another"] += 1
                else:
                    seen.add(beginning)
                    yield Talk(f"self-{self.seed}-{number:05d}", ({"role": "user", "content": text},), "self-written")
                    number += 1
            batch += 1

    def _written(self, target: Target, opening: list[int], batch: int) -> list[str]:
        """One batch of turns, those that ended by themselves and do not loop."""
        made = answers(
            target,
            [opening] * self.rows,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_tokens,
            rows=self.rows,
            seed=seeds.written_seed(self.seed, batch),
        )
        ordered = sorted(made, key=lambda one: one.index)
        whole = [one.tokens[:-1] for one in ordered if not one.cut and not is_looping(one.tokens)]
        return [str(target.tokenizer.decode(list(tokens))).strip() for tokens in whole]

    def _usable(self, text: str, markers: tuple[str, ...]) -> bool:
        words = word_count(text)
        printable = text.replace("\n", " ").isprintable()
        return self.min_words <= words <= self.max_words and printable and not any(m in text for m in markers)

    def identity(self) -> dict[str, Any]:
        return {"self_written": {key: value for key, value in vars(self).items() if key != "licence"}}

    def licences(self) -> dict[str, str]:
        return {"self-written": self.licence}


def user_opening(target: Target) -> list[int]:
    """The template up to where a user's text begins, as ids. Raises UserError where it does not render that text."""
    mark = "\u241f"
    text = Chat(target.tokenizer).rendered([{"role": "user", "content": mark}])
    before, found, _ = text.partition(mark)
    if not found:
        raise UserError("chat template: does not render the text of a user's turn, so the target cannot write one")
    return target.tokenizer(before, add_special_tokens=False)["input_ids"]
