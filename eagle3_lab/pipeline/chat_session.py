"""A conversation in the terminal: the target answers by one method, and each response is printed as it is decoded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from eagle3_lab import seeds
from eagle3_lab.data.chat import Chat, Message
from eagle3_lab.decode.loop import OnTokens, decode, room
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.metrics import pooled_tau
from eagle3_lab.interfaces import Law, Proposer, Verifier
from eagle3_lab.system.progress import duration, rate
from eagle3_lab.system.terminal import Ink, TextStream
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Decoded, Needs

STOPPED = {"end": "", "length": ", stopped by --max-new-tokens", "context": ", stopped by the end of the context"}


class ChatSession:
    """A conversation with a target. Responses go to stdout, the line on each to stderr.

    Args:
        target: that answers.
        proposer: built for the target.
        law: sampling parameters.
        verifier: of the method.
        name: of the method, printed behind each response.
        max_new_tokens: longest response.
        seed: of all draws of the conversation.
    """

    def __init__(
        self,
        target: HFTarget,
        proposer: Proposer,
        law: Law,
        verifier: Verifier,
        *,
        name: str,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._target, self._proposer, self._law, self._verifier = target, proposer, law, verifier
        self._name, self._limit = name, max_new_tokens
        self._chat = Chat(target.tokenizer)
        self._messages: list[Message] = []
        self._seed, self._turn = seed, -1

    def answer(self, text: str) -> Decoded:
        """Answer a user's message, print the response as it is decoded, and return its tokens and rounds.

        Raises:
            UserError: the conversation does not fit the target's context.
        """
        self._turn += 1
        self._messages.append({"role": "user", "content": text})
        ids, context = self._chat.prompt_ids(self._messages), self._target.spec.max_positions
        if len(ids) >= context:
            raise UserError(
                f"generate: the conversation has {len(ids)} tokens, which leaves no room for an answer in the target's "
                f"context of {context}; write less, or begin a new conversation"
            )
        stream, ink = TextStream(self._target.tokenizer), Ink(sys.stdout)
        pieces: list[str] = []

        def write(piece: str, drafted: bool) -> None:
            pieces.append(piece)
            ink.write(piece, drafted)

        def on_tokens(_: int, tokens: Sequence[int], accepted: int) -> None:
            for i, token in enumerate(tokens):
                if token not in self._target.spec.end_tokens:
                    write(stream.push(token), drafted=i < accepted)

        began = time.perf_counter()
        decoded = self._decode(ids, on_tokens)
        seconds = time.perf_counter() - began
        write(stream.finish(), drafted=False)
        ink.write("\n")
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        print(summary(self._name, decoded, seconds, coloured=ink.colours), file=sys.stderr)
        return decoded

    def _decode(self, ids: Sequence[int], on_tokens: OnTokens) -> Decoded:
        target, proposer = self._target, self._proposer
        capacity = room(len(ids), self._limit, target.spec.max_positions, proposer)
        (decoded,) = decode(
            target.open(1, capacity, proposer.needs | Needs(logits=True)),
            proposer,
            self._law,
            self._verifier,
            torch.tensor([list(ids)], device=target.device),
            torch.tensor([len(ids)], device=target.device),
            max_new_tokens=self._limit,
            end_tokens=target.spec.end_tokens,
            context_limit=target.spec.max_positions,
            generators=[seeds.generator(seeds.chat_seed(self._seed, self._turn))],
            on_tokens=on_tokens,
        )
        return decoded


def summary(name: str, decoded: Decoded, seconds: float, *, coloured: bool = False) -> str:
    """Return one line on a response: tau, tokens, seconds of wall time (prefill and printing included), tokens/s."""
    rounds = decoded.rounds
    tau = f"tau {pooled_tau([decoded]):.2f} over {len(rounds)} rounds" if rounds else "no round"
    count = len(decoded.tokens)
    speed = f"{count} tokens in {duration(seconds)}, {rate(count, seconds)} tokens/s"
    legend = "; in colour: accepted drafts" if coloured and any(r.accepted for r in rounds) else ""
    return f"[{name}: {tau}, {speed}{STOPPED[decoded.ended]}{legend}]"
