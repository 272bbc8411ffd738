"""A response printed in a terminal while it is decoded: text as soon as it is certain, accepted drafts in colour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import TextIOBase
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import transformers  # takes a second


UNFINISHED = "\ufffd"  # decoders return this for the first bytes of a character whose last bytes are missing
DRAFTED, PLAIN = "\x1b[32m", "\x1b[0m"  # green

Out = TextIO | TextIOBase


class TextStream:
    """Turns tokens into text, one by one. A character of several tokens is returned with its last token.

        stream = TextStream(tokenizer)
        "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens)

    Each call decodes only the tokens since the last text, and the piece before it: in its context the tokenizer decides
    about the space before a word.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # index of the first token of the piece before the last one
        self._done = 0  # number of tokens that were returned as text

    def push(self, token: int) -> str:
        """Return the text that is certain with this token, often ""."""
        self._tokens.append(token)
        text = self._rest()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the text of the last tokens: a character that was not completed."""
        text = self._rest()
        self._context, self._done = self._done, len(self._tokens)
        return text

    def _rest(self) -> str:
        before = self._decode(self._tokens[self._context : self._done])
        return self._decode(self._tokens[self._context :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class Ink:
    """Writes text at once, accepted drafts in colour.

    Args:
        out: coloured where it is a terminal.
        environment: a non-empty NO_COLOR in it disables colours (https://no-color.org).
    """

    def __init__(self, out: Out, environment: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self.colours = out.isatty() and not environment.get("NO_COLOR")

    def write(self, text: str, drafted: bool = False) -> None:
        """Write text; ``drafted``: it is of drafts that the target accepted."""
        if text:
            self._out.write(f"{DRAFTED}{text}{PLAIN}" if drafted and self.colours else text)
            self._out.flush()
