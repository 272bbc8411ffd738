"""`generate`: see a method at work, token by token, on a prompt of one's own or in a small chat."""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3_lab import seeds
from eagle3_lab.commands.terminal import Ink, TextStream
from eagle3_lab.data.chat import Chat, Message
from eagle3_lab.decode.loop import OnTokens, decode, room
from eagle3_lab.decode.methods import Head, Method, Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.errors import UserError, near
from eagle3_lab.evaluation.metrics import pooled_tau
from eagle3_lab.evaluation.runner import VANILLA
from eagle3_lab.experiment import Experiment
from eagle3_lab.interfaces import Law, Proposer, Verifier
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.run_folder import DRAFT, Work, beginning, find_head
from eagle3_lab.pipeline.trained_heads import gather
from eagle3_lab.system.files import is_file
from eagle3_lab.system.progress import duration, rate
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training import checkpoint
from eagle3_lab.training.options import Model
from eagle3_lab.types import Decoded, Needs

STOPPED = {"end": "", "length": ", stopped by --max-new-tokens", "context": ", stopped by the end of the context"}


def generate(
    experiment: Experiment,
    *,
    prompt: str | None = None,
    method: str | None = None,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    checkpoint_path: Path | None = None,
) -> None:
    """Answer a prompt in the terminal as it is decoded; without one, chat until an empty line.

    Accepted drafts are in colour, the target's own tokens plain. Each answer closes with its tau and speed.

    Args:
        experiment: whose target, trained head and methods.
        prompt: what to answer; by default lines are read from stdin, and each answer sees those before it.
        method: a name in ``evaluate.methods``, or ``vanilla``; by default the last one there that needs a head.
        max_new_tokens: longest answer.
        temperature: 0 is greedy; by default the first law of the experiment's ``evaluate``.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment, and before that
            the experiment's public head as it is.

    Raises:
        UserError: nothing asked, a value out of range, no such method, or a head that is missing, of another target or
            not of the method's.
    """
    if prompt is not None and not prompt.strip():
        raise UserError("generate: the prompt is empty; write what is to be answered, or nothing at all for a chat")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be >= 1, got {max_new_tokens}")
    name, chosen = _choose(experiment, method)
    law = _law(experiment, temperature)
    if checkpoint_path is not None and not chosen.needs_own_head:
        raise UserError(
            f"--checkpoint-path: {checkpoint_path} holds a head, and {name} proposes with none of this experiment's; "
            "choose another --method"
        )
    if chosen.needs_own_head:
        model = _require_sections(experiment, name)
        if checkpoint_path is None and model.public is None:
            _require_some_head(experiment)
    target = inputs.load_target(experiment)
    own = _head(experiment, target, checkpoint_path) if chosen.needs_own_head else None
    heads = gather(own, {name: chosen}, experiment, target)
    try:
        proposer = chosen.proposer(target.spec, heads.of(chosen))
    except ValueError as error:
        raise UserError(f"evaluate.methods.{name}: {error}") from None
    speaker = Speaker(
        target, proposer, law, chosen.verifier, name=name, max_new_tokens=max_new_tokens, seed=experiment.seed
    )
    if prompt is not None:
        speaker.answer(prompt)
        return
    while asked := _line():
        speaker.answer(asked)


generate.positional = "prompt"  # pyright: ignore[reportFunctionMemberAccess]


class Speaker:
    """One side of a conversation: a target that answers by one method and remembers what was said.

    Text goes to stdout; what is said about it to stderr, so that a pipe gets the answer alone.

    Args:
        target: who answers.
        proposer: made for it.
        law: what tokens are drawn from.
        verifier: how its drafts are judged.
        name: the method's.
        max_new_tokens: longest answer.
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
        self._said: list[Message] = []
        self._seed, self._turn = seed, -1

    def answer(self, text: str) -> Decoded:
        """Answer one user turn, aloud.

        Raises:
            UserError: the conversation no longer fits the target's context.
        """
        self._turn += 1
        self._said.append({"role": "user", "content": text})
        ids, context = self._chat.prompt_ids(self._said), self._target.spec.max_positions
        if len(ids) >= context:
            raise UserError(
                f"generate: the conversation has {len(ids)} tokens, which leaves no room for an answer in the target's "
                f"context of {context}; write less, or begin anew"
            )
        stream, ink = TextStream(self._target.tokenizer), Ink(sys.stdout)
        spoken: list[str] = []

        def say(piece: str, drafted: bool) -> None:
            spoken.append(piece)
            ink.write(piece, drafted)

        def on_tokens(_: int, tokens: Sequence[int], accepted: int) -> None:
            for i, token in enumerate(tokens):
                if token not in self._target.spec.end_tokens:
                    say(stream.push(token), drafted=i < accepted)

        began = time.perf_counter()
        decoded = self._decode(ids, on_tokens)
        seconds = time.perf_counter() - began
        say(stream.finish(), drafted=False)
        ink.write("\n")
        self._said.append({"role": "assistant", "content": "".join(spoken)})
        print(closing(self._name, decoded, seconds, coloured=ink.colours), file=sys.stderr)
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


def closing(name: str, decoded: Decoded, seconds: float, *, coloured: bool = False) -> str:
    """One line on an answer: tau, tokens, seconds of wall time (prefill and printing included), tokens per second."""
    rounds = decoded.rounds
    tau = f"tau {pooled_tau([decoded]):.2f} over {len(rounds)} rounds" if rounds else "no round"
    count = len(decoded.tokens)
    spent = f"{count} tokens in {duration(seconds)}, {rate(count, seconds)} tokens/s"
    legend = "; in colour: accepted drafts" if coloured and any(r.accepted for r in rounds) else ""
    return f"[{name}: {tau}, {spent}{STOPPED[decoded.ended]}{legend}]"


def _choose(experiment: Experiment, name: str | None) -> tuple[str, Method]:
    named = {} if experiment.evaluate is None else experiment.evaluate.methods
    methods: dict[str, Method] = {VANILLA: Vanilla(), **named}
    if name is None:
        name = ([n for n, method in methods.items() if method.needs_head] or list(methods))[-1]
    if name not in methods:
        raise UserError(f"--method: {name!r} is not in evaluate.methods{near(name, methods)}")
    return name, methods[name]


def _law(experiment: Experiment, temperature: float | None) -> Law:
    if temperature is not None:
        try:
            return SamplingLaw(temperature)
        except ValueError as error:
            raise UserError(f"--temperature: {error}") from None
    return SamplingLaw() if experiment.evaluate is None else next(iter(experiment.evaluate.by_law.values()))


def _require_sections(experiment: Experiment, name: str) -> Model:
    if experiment.lacks():
        raise UserError(
            f"evaluate.methods.{name}: needs a trained head, and the experiment has no "
            f"{', no '.join(experiment.lacks())}; name in its `head` who trained one, add the sections it was trained "
            f"with, or choose --method {VANILLA}"
        )
    assert experiment.model is not None
    return experiment.model


def _require_some_head(experiment: Experiment) -> None:
    """Told before the target is loaded, where no training of that name has ended at all."""
    works = experiment.tracking.folder / "work"
    if not any(works.glob(f"{glob.escape(experiment.name)}-*/{DRAFT}")):
        raise _no_head(works)


def _head(experiment: Experiment, target: HFTarget, path: Path | None) -> Head:
    assert experiment.model is not None and experiment.data is not None
    model = experiment.model
    source, draft, public, size = model.features, model.draft, model.public, model.vocabulary_size(target.spec)
    if path is not None:
        find_head(str(path), experiment, target).load(target, source, draft, draft_vocab=size)
    else:
        path = Work.of(experiment, target, inputs.build_data(experiment, target, answer=False)).draft
        if not path.is_file() and public is None:
            raise _no_head(path)
        if is_file(path):
            checkpoint.restore(path, target, source, draft, draft_vocab=size)
        elif (start := beginning(experiment, target)) is not None:
            start.load(target, source, draft, draft_vocab=size)
    return Head(source.to(target.device).eval(), draft.to(target.device).eval(), target.record)


def _no_head(where: Path) -> UserError:
    return UserError(
        f"{where}: this experiment has no trained head yet; run `fit`, or give --checkpoint-path, or --method vanilla"
    )


def _line() -> str:
    """The next line of the chat; empty at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
