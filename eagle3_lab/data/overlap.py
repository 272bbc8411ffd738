"""Training text that evaluation prompts are found in: a head must not have seen what it is measured on.

Two texts overlap where they are equal once normalised, or share thirteen words in a row, or where an evaluation prompt
of six to twelve words stands in the other as a whole.

Chinese, Japanese, Thai, Lao, Khmer, Burmese and their like write no spaces between words. There each character is
compared on its own and counts as a part of a word: a Han character as one, a kana as half of one (particles and endings
are kana, so that thirteen of them stand in many questions), an alphabet's letter as a quarter.

Source: 13-grams of words as in GPT-3's decontamination (arXiv 2005.14165, appendix C). The shares of a word are ours.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator

from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.tasks import HELD_OUT, Task

GRAM = 13
SHORT = 6  # an evaluation prompt of fewer words overlaps only with its equal: "write a poem" stands everywhere

_WORD = 4  # quarters
_QUARTERS = {
    1: (
        *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19FF), (0x1A20, 0x1AAF), (0x1B00, 0x1B7F)),
        *((0xA980, 0xA9FF), (0xAA60, 0xAADF)),
    ),  # Thai, Lao; Burmese; Khmer; Tai Le, New Tai Lue; Tai Tham; Balinese; Javanese; Tai Viet
    2: ((0x3040, 0x30FF), (0x31F0, 0x31FF)),  # kana
    4: ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA48F), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
}
"""Blocks of characters that are written without spaces between words, by how many quarters of a word one counts as."""


class _Parts(dict[int, str]):
    """What each character becomes: itself, between spaces where it stands for itself, or a space. Filled as it is used.

    Marks belong to the letters before them: without them an Indic word would fall to pieces.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:  # they choose a glyph
            part = ""
        elif character != "_" and not character.isalnum() and unicodedata.category(character) not in ("Mn", "Mc"):
            part = " "
        else:
            part = f" {character} " if _quarters(code) else character
        self[code] = part
        return part


class _Worth(dict[str, int]):
    """Quarters of a word that each part counts as. Filled as it is used."""

    def __missing__(self, part: str) -> int:
        self[part] = worth = (_quarters(ord(part)) if len(part) == 1 else 0) or _WORD
        return worth


_PARTS, _SIZE = _Parts(), _Worth()


def _quarters(code: int) -> int:
    """How many quarters of a word a character counts as; 0 where words are written with spaces."""
    for quarters, blocks in _QUARTERS.items():
        if any(first <= code <= last for first, last in blocks):
            return quarters
    return 0


def normalised(text: str) -> str:
    """Lower-case words, and characters of languages without spaces, with single spaces between them; compatibility
    forms folded, everything else dropped."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_PARTS).split())


def word_count(text: str) -> float:
    """How many words a text has: what stands between spaces; without spaces, by the characters' shares."""
    return sum((max(1.0, sum(map(_quarters, map(ord, piece))) / _WORD) for piece in text.split()), start=0.0)


def opening_words(text: str, count: int) -> str:
    """The first ``count`` words of a text, normalised."""
    parts = normalised(text).split()
    return " ".join(parts[: _reach(parts, 0, count * _WORD)])


def _reach(parts: list[str], start: int, quarters: int) -> int:
    """Where ``parts`` from ``start`` on have so many quarters of a word; behind the last one where they have fewer."""
    end = start
    while end < len(parts) and quarters > 0:
        quarters -= _SIZE[parts[end]]
        end += 1
    return end


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
            for gram in _grams(words):
                self._grams.setdefault(gram, name)
        self._sizes = sorted({len(gram) for gram in self._grams})
        self._begins = {(len(gram), gram[0]) for gram in self._grams}
        self.identity = digest.hexdigest()[:16]

    def __call__(self, texts: Iterable[str]) -> str:
        """The name of an evaluation set that one of ``texts`` overlaps with, or ""."""
        for text in texts:
            words = normalised(text).split()
            if found := self._equal.get(" ".join(words)):
                return found
            for size in self._sizes:
                for i in range(len(words) - size + 1):
                    if (size, words[i]) in self._begins and (found := self._grams.get(tuple(words[i : i + size]))):
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


def _grams(words: list[str]) -> Iterator[tuple[str, ...]]:
    """The runs of an evaluation prompt that no other text may share: GRAM words long, or all of it where it is shorter;
    none of a very short one."""
    left = sum(_SIZE[word] for word in words)
    if left < SHORT * _WORD:
        return
    for start, word in enumerate(words):
        if start and left < GRAM * _WORD:
            return
        yield tuple(words[start : _reach(words, start, GRAM * _WORD)])
        left -= _SIZE[word]
