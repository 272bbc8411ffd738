"""Training text that evaluation prompts are found in: a head must not have seen what it is measured on.

Two texts overlap where they are equal once normalised, or share thirteen words in a row, or where an evaluation prompt
of six to twelve words stands in the other as a whole.

Source: 13-grams of words as in GPT-3's decontamination (arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator

from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.tasks import HELD_OUT, Task

GRAM = 13
SHORT = 6  # an evaluation prompt of fewer words overlaps only with its equal: "write a poem" stands everywhere

_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """Lower-case words with single spaces, compatibility forms folded, everything else dropped."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


class Overlap:
    """Finds evaluation prompts in training text.

    Args:
        prompts: (the set's name, a user turn's text) of all that is measured on.

    Attributes:
        identity: equal where the same is found.
    """

    def __init__(self, prompts: Iterable[tuple[str, str]]) -> None:
        digest = hashlib.sha256()
        self._equal: dict[str, str] = {}
        self._grams: dict[tuple[str, ...], str] = {}
        for name, text in prompts:
            words = normalised(text).split()
            digest.update(json.dumps([name, words]).encode())
            if words:
                self._equal.setdefault(" ".join(words), name)
            for gram in _grams(words, min(GRAM, len(words))) if len(words) >= SHORT else ():
                self._grams.setdefault(gram, name)
        self._sizes = sorted({len(gram) for gram in self._grams})
        self.identity = digest.hexdigest()[:16]

    def __call__(self, texts: Iterable[str]) -> str:
        """The name of an evaluation set that one of ``texts`` overlaps with, or ""."""
        for text in texts:
            words = normalised(text).split()
            if found := self._equal.get(" ".join(words)):
                return found
            for size in self._sizes:
                for gram in _grams(words, size):
                    if found := self._grams.get(gram):
                        return found
        return ""


def measured_on(tasks: Iterable[Task]) -> Overlap:
    """Finds the prompts of these tasks, but for the held-out conversations, which the data keeps out itself.

    Raises:
        UserError: a task that cannot be loaded.
    """
    named = [task for task in tasks if task.name != HELD_OUT or task.path is not None]
    return Overlap((task.name, turn) for task in named for prompt in task.prompts() for turn in prompt.turns)


def unmeasured(conversations: Iterable[Conversation], overlap: Overlap, report: Report) -> Iterator[Conversation]:
    """Those whose user turns overlap with no evaluation prompt; the others are counted by set. One by one, so that
    whoever takes them can show how far it is."""
    for one in conversations:
        if found := overlap(turn["content"] for turn in one.messages if turn["role"] == "user"):
            report.dropped[f"overlaps with {found}"] += 1
        else:
            yield one


def _grams(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))
