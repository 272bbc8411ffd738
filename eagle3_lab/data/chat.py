"""From messages to token ids and to which of them the target wrote, through the tokenizer's own chat template.

Published templates carry no generation markers, and markers imitated in a text fool every search for them. So spans
are found by rendering: with the messages before an answer and the generation prompt, then with the answer. What was
added is the answer. A template for which that does not come out exactly is refused; a silent mask of zeros never is
the result.

Knows a tokenizer; does not know files, lengths or rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eagle3_lab.errors import UserError

Message = dict[str, str]
"""One turn: its ``role`` (system, user or assistant) and its ``content``."""

Span = tuple[int, int]
"""Where an answer stands in a rendered text: its first character, and the one behind its end-of-turn token."""


@dataclass(frozen=True)
class Encoded:
    """A conversation's token ids, and for each whether the target wrote it (its end-of-turn token included)."""

    ids: list[int]
    supervised: list[bool]


class Chat:
    """A tokenizer's chat template, with the answers' spans made exact.

    Attributes:
        end_of_turn: id of the token that ends an answer.
        kept_ids: special tokens that stand in every rendering, ascending, ``end_of_turn`` among them: a draft
            vocabulary always keeps them.
        template_hash: identity of the template's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises UserError, which names the template's fault, if answers cannot be told from the rest."""
        self._tokenizer = tokenizer
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                "chat template: the tokenizer has none; use a chat (instruct) model, or set tokenizer.chat_template"
            ) from None
        self.template_hash = hashlib.sha256(template.encode()).hexdigest()[:16]  # as TargetSpec's
        special = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)
        self._closing, self._closing_kept, self.end_of_turn = self._find_closing(special)
        probe = self._render([{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}])
        self.kept_ids = tuple(sorted(special.intersection(self._ids(probe))))

    def encode(self, messages: Sequence[Message], *, cut: bool = False) -> Encoded:
        """Ids of a whole conversation; every assistant turn is supervised.

        ``cut``: the target ran out of tokens in the last answer, so the text ends with it, without an end of turn that
        the target never wrote.

        The ids are those that are served. What is tokenised at once is the text up to the end of a prompt or of an
        answer, as a server does; where a token would straddle such a border, the two sides are tokenised apart,
        because the target wrote its answer behind the prompt's ids as they were.

        Raises:
            UserError: no assistant turn, or a template that changes, moves or hides one.
        """
        text, spans = self._spans(messages)
        if not spans:
            raise UserError("conversation: no assistant turn, so there is nothing to learn from")
        if cut:
            start, end = spans[-1]
            end -= self._closing_kept
            spans[-1], text = (start, end), text[:end]
        return self._tokenise(text, spans)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to and including the generation prompt: the beginning of ``encode([*messages, answer]).ids``."""
        whole, spans = self._spans(messages)
        text = self._render(messages, generation=True)
        if spans and text[: spans[-1][1]] != whole[: spans[-1][1]]:
            _refuse("changes earlier turns when the generation prompt is added")
        return self._tokenise(text, spans).ids

    def _render(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        except TemplateError as error:
            said = " ".join(str(error).split())
            raise UserError(f"chat template: cannot render roles {[m['role'] for m in messages]} ({said})") from None
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _find_closing(self, special: frozenset[int]) -> tuple[str, int, int]:
        """What the template writes behind an answer, how many characters of it the target writes itself, and the id
        of the end-of-turn token among them."""
        question: list[Message] = [{"role": "user", "content": "alpha"}]
        before = self._render(question, generation=True)
        after = self._render([*question, {"role": "assistant", "content": "beta"}])
        if not after.startswith(before):
            _refuse("renders a generation prompt with which the rendered answer does not begin")
        opening, found, closing = after[len(before) :].partition("beta")
        if not found:
            _refuse("does not render the text of an assistant turn")
        if opening.strip():
            _refuse(f"writes {opening!r} between the generation prompt and the answer")
        for token in self._ids(closing):
            if token in special:
                name = str(self._tokenizer.convert_ids_to_tokens(token))
                space, _, _ = closing.partition(name)
                if space.strip():
                    _refuse(f"writes {space!r} between an answer and its end-of-turn token")
                return closing, len(space) + len(name), token
        _refuse(f"ends an answer with {closing!r}, in which there is no special token: no end of turn")

    def _spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The rendered conversation and its answers' spans in it."""
        whole = self._render(messages)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], generation=True)
            upto = self._render(messages[: i + 1])
            stop = len(upto) - len(self._closing)
            if not upto.startswith(before) or not upto.endswith(self._closing) or stop < len(before):
                _refuse(f"renders turn {i} (assistant) otherwise than the prompt, the answer and its end")
            if upto[len(before) : stop].strip() != message["content"].strip():
                _refuse(f"changes the text of turn {i} (assistant)")
            end = stop + self._closing_kept
            if whole[:end] != upto[:end]:
                _refuse(f"changes turn {i} (assistant) or one before it when turns follow; give single-answer data")
            spans.append((len(before), end))
        return whole, spans

    def _tokenise(self, text: str, spans: Sequence[Span]) -> Encoded:
        pieces: list[tuple[int, int, bool]] = []
        at = 0
        for start, end in spans:
            pieces += [(at, start, False), (start, end, True)]
            at = end
        if at < len(text):
            pieces.append((at, len(text), False))
        joint = self._tokenizer([text[:end] for _, end, _ in pieces], add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        supervised: list[bool] = []
        for (start, end, mine), upto in zip(pieces, joint, strict=True):
            fresh = upto[len(ids) :] if upto[: len(ids)] == ids else self._ids(text[start:end])
            ids += fresh
            supervised += [mine] * len(fresh)
        return Encoded(ids, supervised)


def _refuse(what: str) -> NoReturn:
    raise UserError(f"chat template: {what}; the answers cannot be masked with it")
