"""From messages to token ids and to which of them the target wrote, through the tokenizer's own chat template.

Published templates carry no generation markers, and markers imitated in a text fool every search for them. So spans
are found by rendering: with the messages before an answer and the generation prompt, then with the answer. What was
added is the answer. A template for which that does not come out exactly is refused; a silent mask of zeros never is
the result.

Thinking templates take the reasoning of earlier turns away, and some open it in the generation prompt. No rendering of
the whole conversation shows such an answer as it was written, so each is put behind the prompt as that was served: one
conversation becomes several documents, each with the answers that followed each other unchanged; what the prompt
supplies, and earlier answers without their reasoning, are not supervised.

Knows a tokenizer; does not know files, lengths or rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from eagle3_lab.errors import UserError

if TYPE_CHECKING:
    import transformers  # takes a second

Message = dict[str, str]
"""One turn: its ``role`` (system, user, assistant or tool) and its ``content``."""

Span = tuple[int, int]
"""Where an answer stands in a rendered text: its first character, and the one behind its end-of-turn token."""

THINK, UNTHINK = "<think>", "</think>"
_SUPPLIED = re.compile(rf"{THINK}\s*(?:{UNTHINK}\s*)?$")
_EMPTY = re.compile(rf"{THINK}\s*{UNTHINK}")

Reasoning = Literal["free", "asked", "opened", "closed"]
"""What a thinking template's generation prompt says of reasoning: nothing; that the target has to open it itself; that
it is open; that it is over before it began."""


_PROBE: tuple[Message, ...] = ({"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"})


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
        markers: the special tokens' texts: a user's text that holds one is read as the token.
        takes_tools: whether the template renders a tool's result.
        template_hash: identity of the template's text.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
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
        self._supplied, self._opening, self._closing = self._find_borders()
        self._closing_kept, self.end_of_turn = self._find_end_of_turn(special)
        self._reasoning: Reasoning | None = self._find_reasoning()
        tags = "" if self._reasoning is None else THINK + UNTHINK
        seen = self._ids(self.rendered(_PROBE) + self.rendered(_PROBE[:1], generation=True) + tags)
        self.kept_ids = tuple(sorted(special.intersection(seen)))
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.markers = tuple(sorted(filter(str.strip, added | set(tokenizer.all_special_tokens))))
        self.takes_tools = self._renders_tools()

    def encode(self, messages: Sequence[Message], *, cut: bool = False) -> Encoded:
        """`encode_each` of a conversation that is one document, as it is under every template but a thinking one.

        Raises:
            UserError: as `encode_each`, and for a conversation of several documents.
        """
        found = self.encode_each(messages, cut=cut)
        if len(found) > 1:
            raise UserError(f"conversation: {len(found)} documents under a thinking template, one is asked for")
        return found[0]

    def encode_each(self, messages: Sequence[Message], *, cut: bool = False) -> list[Encoded]:
        """Ids of a whole conversation; every assistant turn is supervised, in one of the documents.

        ``cut``: the target ran out of tokens in the last answer, so the text ends with it, without an end of turn that
        the target never wrote.

        The ids are those that are served. What is tokenised at once is the text up to the end of a prompt or of an
        answer, as a server does; where a token would straddle such a border, the two sides are tokenised apart,
        because the target wrote its answer behind the prompt's ids as they were.

        Raises:
            UserError: no assistant turn, or a template that changes, moves or hides one.
        """
        found = [self._spans(messages)] if self._reasoning is None else self._served(messages)
        if not found or not found[-1][1]:
            raise UserError("conversation: no assistant turn, so there is nothing to learn from")
        if cut:
            text, spans = found[-1]
            start, end = spans[-1]
            end -= self._closing_kept
            found[-1] = text[:end], [*spans[:-1], (start, end)]
        return [self._tokenise(text, spans) for text, spans in found]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to and including the generation prompt: the beginning of ``encode([*messages, answer]).ids``, or of
        its last document's."""
        text = self.rendered(messages, generation=True)
        if self._reasoning is not None:
            whole, spans = self._served(messages)[-1] if _answered(messages) else ("", [])
            return self._tokenise(text, spans if text.startswith(whole) else []).ids
        whole, spans = self._spans(messages)
        if spans and text[: spans[-1][1]] != whole[: spans[-1][1]]:
            _refuse("changes earlier turns when the generation prompt is added")
        return self._tokenise(text, spans).ids

    def misfit(self, messages: Sequence[Message], *, cut: bool = False) -> str:
        """Why the target cannot have written these answers behind this template's prompts, or "": reasoning where
        there is none to be, or none where it is asked for."""
        answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        for i, answer in enumerate(answers):
            unfinished = cut and i == len(answers) - 1
            if self._reasoning in ("asked", "opened") and UNTHINK not in answer and not unfinished:
                return "no reasoning where the template asks for it (target.thinking: false asks for none)"
            if self._reasoning == "closed" and (THINK in answer or UNTHINK in answer):
                return "reasoning where the template allows none"
        return ""

    def identity(self) -> str:
        """Of all but the tokenizer's vocabulary that ids and masks depend on: the template, the special tokens that it
        may name, and what it writes today, since some write the date."""
        said = [self.rendered(_PROBE), self.rendered(_PROBE[:1], generation=True), self.template_hash]
        said += [str(self.end_of_turn), *map(str, self.kept_ids), *self.markers]
        said += [f"{name} {token}" for name, token in sorted(self._tokenizer.special_tokens_map.items())]
        return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]

    def imitates(self, messages: Sequence[Message]) -> bool:
        """Whether a text that is not the target's holds a special token's text, and so is read as the token."""
        texts = [turn["content"] for turn in messages if turn["role"] != "assistant"]
        return any(marker in text for text in texts for marker in self.markers)

    def rendered(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """The template's text, with the generation prompt behind it or not. Raises UserError where it refuses."""
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        except Exception as error:  # noqa: BLE001 - a template is a program of the target's
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"chat template: cannot render roles {[m['role'] for m in messages]} ({said})") from None
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _find_borders(self) -> tuple[str, str, str]:
        """Of reasoning, what the generation prompt ends with; what the template writes between the prompt without that
        and an answer; and what it writes behind an answer."""
        before, after = self.rendered(_PROBE[:1], generation=True), self.rendered(_PROBE)
        supplied = _SUPPLIED.search(before)
        if supplied is not None and UNTHINK not in supplied.group() and after.startswith(before + "beta"):
            supplied = None  # answers are rendered behind the whole prompt, the thought's opening included
        bare = before if supplied is None else before[: supplied.start()]
        if not after.startswith(bare):
            _refuse("renders a generation prompt with which the rendered answer does not begin")
        opening, found, closing = after[len(bare) :].partition("beta")
        if not found:
            _refuse("does not render the text of an assistant turn")
        if _EMPTY.sub("", opening).strip():
            _refuse(f"writes {opening!r} between the generation prompt and the answer")
        return before[len(bare) :], opening, closing

    def _find_end_of_turn(self, special: frozenset[int]) -> tuple[int, int]:
        """How many characters of the closing the target writes itself, and the id of the end-of-turn token in it."""
        for token in self._ids(self._closing):
            if token in special:
                name = str(self._tokenizer.convert_ids_to_tokens(token))
                space, _, _ = self._closing.partition(name)
                if space.strip():
                    _refuse(f"writes {space!r} between an answer and its end-of-turn token")
                return len(space) + len(name), token
        _refuse(f"ends an answer with {self._closing!r}, in which there is no special token: no end of turn")

    def _find_reasoning(self) -> Reasoning | None:
        """What a thinking template's prompt says of reasoning; None for a template that leaves answers as they are."""
        if self._supplied:
            return "closed" if UNTHINK in self._supplied else "opened"
        if self._opening.strip():
            return "asked"
        answer: Message = {"role": "assistant", "content": f"{THINK}\nrho\n{UNTHINK}\n\nbeta"}
        talk = [_PROBE[0], answer, {"role": "user", "content": "gamma"}]
        try:
            shown = [self.rendered(talk[:count]) for count in (2, 3)]
            stripped = any("rho" not in text and "beta" in text for text in shown)
        except UserError:  # a template of one turn
            return None
        return "free" if stripped else None

    def _renders_tools(self) -> bool:
        try:
            return "delta" in self.rendered([*_PROBE, {"role": "tool", "content": "delta"}], generation=True)
        except UserError:
            return False

    def _served(self, messages: Sequence[Message]) -> list[tuple[str, list[Span]]]:
        """Under a thinking template: texts as they were served, with the spans of the answers in each."""
        found: list[tuple[str, list[Span]]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.rendered(messages[:i], generation=True)
            shown = self.rendered(messages[: i + 1])
            said = message["content"].rpartition(UNTHINK)[2].strip()
            if not shown.endswith(self._closing) or not shown.removesuffix(self._closing).rstrip().endswith(said):
                _refuse(f"changes the text of turn {i} (assistant)")
            answer = message["content"]
            if self._reasoning == "opened" and answer.startswith(THINK):
                answer = answer.removeprefix(THINK).removeprefix(self._supplied.removeprefix(THINK))
            end = len(prompt) + len(answer) + self._closing_kept
            if not found or not prompt.startswith(found[-1][0]):
                found.append(("", []))
            found[-1] = prompt + answer + self._closing, [*found[-1][1], (len(prompt), end)]
        return found

    def _spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The rendered conversation and its answers' spans in it."""
        whole = self.rendered(messages)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.rendered(messages[:i], generation=True)
            upto = self.rendered(messages[: i + 1])
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


def _answered(messages: Sequence[Message]) -> bool:
    return any(turn["role"] == "assistant" for turn in messages)


def _refuse(what: str) -> NoReturn:
    raise UserError(f"chat template: {what}; the answers cannot be masked with it")
