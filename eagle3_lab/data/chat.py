"""From messages to token ids and to which of them the target wrote, through the tokenizer's own chat template.

Published templates carry no generation markers, and markers imitated in a text fool every search for them. So spans
are found by rendering: with the messages before an answer and the generation prompt, then with the answer. What was
added is the answer. A template for which that does not come out exactly is refused; a silent mask of zeros never is
the result.

Thinking templates take the reasoning of earlier turns away, and some open it in the generation prompt. No rendering of
the whole conversation shows such an answer as it was written, so each is put behind the prompt as that was served: one
conversation becomes several documents, each with the answers that followed each other unchanged; what the prompt
supplies, and earlier answers without their reasoning, are not supervised.

What an answer has beside its text (a tool that it calls, reasoning) is rendered by the template or the conversation is
refused: that the template renders it is seen by rendering with and without.

Knows a tokenizer; does not know files, lengths or rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from eagle3_lab.data.turns import REASONING, WRITTEN, Message, Tools
from eagle3_lab.errors import UserError

if TYPE_CHECKING:
    import transformers  # takes a second

Span = tuple[int, int]
"""Where an answer stands in a rendered text: its first character, and the one behind its end-of-turn token."""

CHANGED, MOVED = "changes an answer's text", "renders an answer otherwise than the prompt, the answer and its end"
CONTEXT = 8  # tokens of a prompt that are decoded with what is written behind it

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


class Refused(UserError):
    """A conversation that a template cannot render or mask. ``reason``: the same words for all of one fault, to count
    them by."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = f"the chat template {reason}"


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
        self._anchor = self._find_anchor()

    def encode(self, messages: Sequence[Message], *, cut: bool = False, tools: Tools = ()) -> Encoded:
        """`encode_each` of a conversation that is one document, as it is under every template but a thinking one.

        Raises:
            UserError: as `encode_each`, and for a conversation of several documents.
        """
        found = self.encode_each(messages, cut=cut, tools=tools)
        if len(found) > 1:
            raise UserError(f"conversation: {len(found)} documents under a thinking template, one is asked for")
        return found[0]

    def encode_each(self, messages: Sequence[Message], *, cut: bool = False, tools: Tools = ()) -> list[Encoded]:
        """Ids of a whole conversation; every assistant turn is supervised, in one of the documents.

        ``cut``: the target ran out of tokens in the last answer, so the text ends with it, without an end of turn that
        the target never wrote.

        The ids are those that are served. What is tokenised at once is the text up to the end of a prompt or of an
        answer, as a server does; where a token would straddle such a border, the two sides are tokenised apart,
        because the target wrote its answer behind the prompt's ids as they were.

        ``tools``: the definitions that the target read.

        Raises:
            UserError: no assistant turn.
            Refused: a template that refuses these turns, or changes, moves or hides an answer or what belongs to it.
        """
        self._require_rendered(messages, tools)
        found = [self._spans(messages, tools)] if self._reasoning is None else self._served(messages, tools)
        if not found or not found[-1][1]:
            raise UserError("conversation: no assistant turn, so there is nothing to learn from")
        if cut:
            text, spans = found[-1]
            start, end = spans[-1]
            end -= self._closing_kept
            found[-1] = text[:end], [*spans[:-1], (start, end)]
        return [self._tokenise(text, spans) for text, spans in found]

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids up to and including the generation prompt: the beginning of ``encode([*messages, answer]).ids``, or of
        its last document's. Raises Refused as `encode_each`."""
        text = self.rendered(messages, generation=True, tools=tools)
        if self._reasoning is not None:
            whole, spans = self._served(messages, tools)[-1] if _answered(messages) else ("", [])
            return self._tokenise(text, spans if text.startswith(whole) else []).ids
        whole, spans = self._spans(messages, tools)
        if spans and text[: spans[-1][1]] != whole[: spans[-1][1]]:
            _refuse("changes earlier turns when the generation prompt is added")
        return self._tokenise(text, spans).ids

    def text_behind(self, prompt: Sequence[int], written: Sequence[int]) -> str:
        """The text of tokens that were written behind a prompt, as the content of a turn. Alone, the first token of
        many tokenizers loses the space before it."""
        before = list(prompt[-CONTEXT:])
        text, joint = (str(self._tokenizer.decode(ids)) for ids in (before, [*before, *written]))
        found = joint.removeprefix(text) if joint.startswith(text) else str(self._tokenizer.decode(list(written)))
        return self.content_of(found)

    def content_of(self, written: str) -> str:
        """What was written behind a prompt, without the space that the template itself puts before an answer."""
        return written.removeprefix(self._opening) if self._opening.isspace() else written

    def taught(
        self, messages: Sequence[Message], answer: str, *, cut: bool = False, tools: Tools = ()
    ) -> list[int] | None:
        """The tokens that training supervises where ``answer`` follows ``messages``, its end of turn included unless it
        is ``cut``: what was written, if and only if they are equal. None where the template refuses such an answer, or
        changes the prompt's ids before it."""
        try:
            prompt = self.prompt_ids(messages, tools)
            found = self.encode_each([*messages, {"role": "assistant", "content": answer}], cut=cut, tools=tools)[-1]
        except Refused:
            return None
        if found.ids[: len(prompt)] != prompt:
            return None
        behind = zip(found.ids[len(prompt) :], found.supervised[len(prompt) :], strict=True)
        return [token for token, mine in behind if mine]

    def refusal(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Why ``messages``, of which the last is a question, cannot be put to the target, or ""."""
        try:
            self._require_rendered(messages, tools)
            self.prompt_ids(messages, tools)
        except Refused as error:
            return error.reason
        return ""

    def misfit(self, messages: Sequence[Message], *, cut: bool = False) -> str:
        """Why the target cannot have written these answers behind this template's prompts, or "": reasoning where
        there is none to be, or none where it is asked for."""
        answers = [turn for turn in messages if turn["role"] == "assistant"]
        for i, answer in enumerate(answers):
            unfinished = cut and i == len(answers) - 1
            text, beside = answer["content"], any(key in answer for key in REASONING)
            if self._reasoning in ("asked", "opened") and UNTHINK not in text and not beside and not unfinished:
                return "no reasoning where the template asks for it (target.thinking: false asks for none)"
            if self._reasoning == "closed" and (THINK in text or UNTHINK in text or beside):
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

    def rendered(self, messages: Sequence[Message], *, generation: bool = False, tools: Tools = ()) -> str:
        """The template's text, with the generation prompt behind it or not. Raises Refused where it refuses."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of the target's
            fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            roles = [message["role"] for message in messages]
            raise Refused(f"chat template: cannot render roles {roles} ({fault})", f"refuses it ({fault})") from None
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
        """Whether a tool's result is rendered, behind a call that is written out or in the fields for it."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "beta", "arguments": {}}}
        called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "content": "delta", "name": "beta", "tool_call_id": call["id"]}
        for talk in ([*_PROBE, {"role": "tool", "content": "delta"}], [_PROBE[0], called, result]):
            try:
                if "delta" in self.rendered(talk, generation=True):
                    return True
            except Refused:
                continue
        return False

    def _find_anchor(self) -> str:
        """What a text is put behind to be read as the middle of one: a line break, where the tokenizer puts a space
        before what it reads alone; else nothing."""
        anchor, alone = self._ids("\n"), self._ids("alpha")
        joint = self._ids("\nalpha")
        return "\n" if joint[: len(anchor)] == anchor and joint[len(anchor) :] != alone else ""

    def ids_behind(self, text: str) -> list[int]:
        """Ids of a text that stands behind another."""
        anchor, joint = self._ids(self._anchor), self._ids(self._anchor + text)
        return joint[len(anchor) :] if joint[: len(anchor)] == anchor else self._ids(text)

    def _require_rendered(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises Refused where the template leaves out tools, or what an answer has beside its text."""
        first = next((i for i, turn in enumerate(messages) if turn["role"] == "assistant"), len(messages))
        if tools:
            prompt = self.rendered(messages[:first], generation=True, tools=tools)
            for some in ((), *((*tools[:i], *tools[i + 1 :]) for i in range(len(tools)) if len(tools) > 1)):
                if self._renders(messages[:first], some, prompt, generation=True):
                    _refuse("does not render tools")
        for i, turn in enumerate(messages):
            if turn["role"] != "assistant" or not any(key in turn for key in WRITTEN):
                continue
            before, shown = messages[:i], self.rendered(messages[: i + 1], tools=tools)
            for key, less in _lessened(turn):
                if self._renders([*before, less], tools, shown):
                    _refuse(f"does not render {key} of turn {i} (assistant)", f"does not render {key}")

    def _renders(self, messages: Sequence[Message], tools: Tools, text: str, *, generation: bool = False) -> bool:
        """Whether the template gives this text; False where it refuses the messages."""
        try:
            return self.rendered(messages, generation=generation, tools=tools) == text
        except Refused:
            return False

    def _served(self, messages: Sequence[Message], tools: Tools) -> list[tuple[str, list[Span]]]:
        """Under a thinking template: texts as they were served, with the spans of the answers in each."""
        found: list[tuple[str, list[Span]]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.rendered(messages[:i], generation=True, tools=tools)
            shown = self.rendered(messages[: i + 1], tools=tools)
            inner = shown.removesuffix(self._closing)
            beside = any(key in message for key in WRITTEN)
            said = message["content"].rpartition(UNTHINK)[2].strip()
            there = said in inner if beside else inner.rstrip().endswith(said)
            if not shown.endswith(self._closing) or not there:
                _refuse(f"changes the text of turn {i} (assistant)", CHANGED)
            if beside and not inner.startswith(prompt):
                _refuse(f"renders turn {i} (assistant) otherwise than the prompt, the answer and its end", MOVED)
            answer = inner[len(prompt) :] if beside else message["content"]
            if self._reasoning == "opened" and answer.startswith(THINK):
                answer = answer.removeprefix(THINK).removeprefix(self._supplied.removeprefix(THINK))
            end = len(prompt) + len(answer) + self._closing_kept
            if not found or not prompt.startswith(found[-1][0]):
                found.append(("", []))
            found[-1] = prompt + answer + self._closing, [*found[-1][1], (len(prompt), end)]
        return found

    def _spans(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered conversation and its answers' spans in it."""
        whole = self.rendered(messages, tools=tools)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.rendered(messages[:i], generation=True, tools=tools)
            upto = self.rendered(messages[: i + 1], tools=tools)
            stop = len(upto) - len(self._closing)
            if not upto.startswith(before) or not upto.endswith(self._closing) or stop < len(before):
                _refuse(f"renders turn {i} (assistant) otherwise than the prompt, the answer and its end", MOVED)
            answer, text = upto[len(before) : stop].strip(), message["content"].strip()
            if text not in answer if any(key in message for key in WRITTEN) else text != answer:
                _refuse(f"changes the text of turn {i} (assistant)", CHANGED)
            end = stop + self._closing_kept
            if whole[:end] != upto[:end]:
                fault = f"changes turn {i} (assistant) or one before it when turns follow; give single-answer data"
                _refuse(fault, "changes turns when others follow")
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
            fresh = upto[len(ids) :] if upto[: len(ids)] == ids else self.ids_behind(text[start:end])
            ids += fresh
            supervised += [mine] * len(fresh)
        return Encoded(ids, supervised)


def _answered(messages: Sequence[Message]) -> bool:
    return any(turn["role"] == "assistant" for turn in messages)


def _lessened(turn: Message) -> list[tuple[str, Message]]:
    """Each field of an answer, with the answer that lacks it, and for calls of tools also that lacks one of them, or
    one's arguments."""
    found = [(key, {name: value for name, value in turn.items() if name != key}) for key in WRITTEN if key in turn]
    calls: list[dict[str, Any]] = turn.get("tool_calls", [])
    for i, call in enumerate(calls):
        function, others = call["function"], lambda *one, i=i: {"tool_calls": [*calls[:i], *one, *calls[i + 1 :]]}
        if len(calls) > 1:
            found.append(("tool_calls", turn | others()))
        if function["arguments"]:
            found.append(("tool_calls", turn | others(call | {"function": function | {"arguments": {}}})))
    return found


def _refuse(what: str, reason: str | None = None) -> NoReturn:
    """Raise Refused. ``reason``: for the count, where ``what`` names a turn."""
    raise Refused(f"chat template: {what}; the answers cannot be masked with it", reason or what)
