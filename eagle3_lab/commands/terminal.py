"""An answer as it appears in a terminal: tokens become text once the text is certain, accepted drafts in colour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import TextIOBase
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import transformers  # takes a second


UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character whose last ones are yet to come
DRAFTED, PLAIN = "\x1b[32m", "\x1b[0m"  # green

Out = TextIO | TextIOBase


class TextStream:
    """Turns tokens into text, one by one. A character of several tokens comes whole, with the last of them.

        stream = TextStream(tokenizer)
        "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens)

    Only the tokens since the last piece of text and the piece before it are decoded anew: that one is the context in
    which a tokenizer decides about the space before a word.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # the piece before the last text begins here
        self._told = 0  # what lies before is text already

    def push(self, token: int) -> str:
        """The text that has become certain with this token, often none."""
        self._tokens.append(token)
        text = self._untold()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return text

    def finish(self) -> str:
        """What was held back: a character that was never completed."""
        text = self._untold()
        self._context, self._told = self._told, len(self._tokens)
        return text

    def _untold(self) -> str:
        before = self._decode(self._tokens[self._context : self._told])
        return self._decode(self._tokens[self._context :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class Ink:
    """Writes pieces of text at once, accepted drafts in colour where ``out`` is a terminal that wants colours."""

    def __init__(self, out: Out, environment: Mapping[str, str] = os.environ) -> None:
        """``environment``: a non-empty NO_COLOR there means no colours (https://no-color.org)."""
        self._out = out
        self.colours = out.isatty() and not environment.get("NO_COLOR")

    def write(self, text: str, drafted: bool = False) -> None:
        """``drafted``: the target accepted this text from a draft."""
        if text:
            self._out.write(f"{DRAFTED}{text}{PLAIN}" if drafted and self.colours else text)
            self._out.flush()
