"""What a tokenizer must do for a target: give a text back, and say which ids stand for one."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from eagle3_lab.errors import UserError

if TYPE_CHECKING:
    import transformers  # takes a second

SAMPLE = "hello brave new world, où est la gare? 你好"
"""Words between spaces, accents, and a script without either."""


def require_round_trip(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that drops part of a text without a trace: one whose class does not fit its file.

    Case, accents and composed characters may change, since some families read a text so; a piece that the tokenizer
    marks as unknown is no silent loss either.

    Raises:
        UserError: the sample comes back without its spaces, or without some of its letters.
    """
    for part in (SAMPLE, *SAMPLE.split()):
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            continue
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if _plain(str(back)) != _plain(part):
            raise UserError(
                f"target.model: the tokenizer of {name!r}, a {type(tokenizer).__name__}, reads {part!r} back as "
                f"{back!r}; name the class that fits its tokenizer.json as tokenizer_class in tokenizer_config.json "
                "(PreTrainedTokenizerFast reads any)"
            )


def require_readable(tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> None:
    """Refuse a tokenizer whose prompts hold ids for which the model's embedding has no row: tokens that were added
    after training. One that no prompt needs, such as padding, is no fault.

    Raises:
        UserError: the first token that the chat template writes, or that begins or ends a text, and its id.
    """
    template, borders = str(tokenizer.chat_template), (tokenizer.bos_token, tokenizer.eos_token)
    for text, token in tokenizer.get_vocab().items():
        if token >= rows and (text in template or text in borders):
            raise UserError(
                f"target.model: the tokenizer of {name!r} writes {text!r} as id {token}, and the model's embedding has "
                f"{rows} rows; resize the embedding, or name a chat template without that token as target.chat_template"
            )


def _plain(text: str) -> str:
    """Lower case, without accents, and without the spaces that some tokenizers put at the ends or around a comma."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    kept = "".join(letter for letter in letters if not unicodedata.combining(letter)).strip()
    for mark in ",?":
        kept = kept.replace(f" {mark}", mark)
    return kept


def real_ids(tokenizer: transformers.PreTrainedTokenizerBase, rows: int, ends: Iterable[int]) -> int:
    """Return one more than the highest id that stands for a text or ends one, at most the head's ``rows``: ids may have
    holes, so their number says nothing."""
    return min(max([*tokenizer.get_vocab().values(), *ends], default=-1) + 1, rows)
