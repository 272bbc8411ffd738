"""`generate`: answer a prompt by one method, or chat, with accepted drafts in colour."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3_lab.decode.methods import Head, Method, Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.errors import UserError, near
from eagle3_lab.evaluation.runner import VANILLA
from eagle3_lab.experiment import Experiment
from eagle3_lab.interfaces import Law
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.chat_session import ChatSession
from eagle3_lab.pipeline.find_head import NotTrained, check_any_head, find_head, own_head
from eagle3_lab.pipeline.trained_heads import load_heads
from eagle3_lab.target_model.hf_target import HFTarget


def generate(
    experiment: Experiment,
    *,
    prompt: str | None = None,
    method: str | None = None,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    checkpoint_path: Path | None = None,
) -> None:
    """Answer a prompt and print the response as it is decoded; without a prompt, chat until an empty line.

    Accepted drafts are in colour, the target's own tokens plain. A line with tau and speed follows each response.

    Args:
        experiment: whose target, trained head and methods are used.
        prompt: what to answer; by default lines are read from stdin, and earlier ones are part of the conversation.
        method: a name in ``evaluate.methods``, or ``vanilla``; by default the last one that needs a head.
        max_new_tokens: longest response.
        temperature: 0 is greedy; by default the first sampling parameters of the experiment's ``evaluate``.
        checkpoint_path: the trained head; by default the one that `fit` trained of this experiment, and before that
            the experiment's public head as it is.

    Raises:
        UserError: an empty prompt, a value out of range, no such method, or a head that is missing, for another target
            or not for the method.
    """
    if prompt is not None and not prompt.strip():
        raise UserError("generate: the prompt is empty; write what is to be answered, or nothing at all for a chat")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be >= 1, got {max_new_tokens}")
    name, chosen = _choose_method(experiment, method)
    law = _sampling(experiment, temperature)
    _check_head(experiment, name, chosen, checkpoint_path)
    target = inputs.load_target(experiment)
    own = _load_head(experiment, target, checkpoint_path) if chosen.needs_own_head else None
    heads = load_heads(own, {name: chosen}, experiment, target)
    try:
        proposer = chosen.proposer(target.spec, heads.of(chosen))
    except ValueError as error:
        raise UserError(f"evaluate.methods.{name}: {error}") from None
    session = ChatSession(
        target, proposer, law, chosen.verifier, name=name, max_new_tokens=max_new_tokens, seed=experiment.seed
    )
    if prompt is not None:
        session.answer(prompt)
        return
    while line := _read_line():
        session.answer(line)


generate.positional = "prompt"  # pyright: ignore[reportFunctionMemberAccess]


def _choose_method(experiment: Experiment, name: str | None) -> tuple[str, Method]:
    own = {} if experiment.evaluate is None else experiment.evaluate.methods
    methods: dict[str, Method] = {VANILLA: Vanilla(), **own}
    if name is None:
        name = ([n for n, method in methods.items() if method.needs_head] or list(methods))[-1]
    if name not in methods:
        raise UserError(f"--method: {name!r} is not in evaluate.methods{near(name, methods)}")
    return name, methods[name]


def _sampling(experiment: Experiment, temperature: float | None) -> Law:
    if temperature is None:
        return SamplingLaw() if experiment.evaluate is None else next(iter(experiment.evaluate.by_law.values()))
    try:
        return SamplingLaw(temperature)
    except ValueError as error:
        raise UserError(f"--temperature: {error}") from None


def _check_head(experiment: Experiment, name: str, method: Method, checkpoint_path: Path | None) -> None:
    """Check, before the target is loaded, that the method can have its head. Raises UserError."""
    if not method.needs_own_head:
        if checkpoint_path is not None:
            raise UserError(
                f"--checkpoint-path: {checkpoint_path} holds a head, and {name} proposes with none of this "
                "experiment's; choose another --method"
            )
        return
    if lacks := experiment.lacks():
        raise UserError(
            f"evaluate.methods.{name}: needs a trained head, and the experiment has no {', no '.join(lacks)}; name in "
            f"its `head` who trained one, add the sections it was trained with, or choose --method {VANILLA}"
        )
    if checkpoint_path is None:
        try:
            check_any_head(experiment)
        except NotTrained as error:
            raise UserError(f"{error}, or --method {VANILLA}") from None


def _load_head(experiment: Experiment, target: HFTarget, checkpoint_path: Path | None) -> Head:
    model = experiment.model
    assert model is not None
    if checkpoint_path is not None:
        place = find_head(str(checkpoint_path), experiment, target)
    else:
        try:
            place = own_head(experiment, target, inputs.build_data(experiment, target, answer=False))
        except NotTrained as error:
            raise UserError(f"{error}, or --method {VANILLA}") from None
    place.load(target, model.features, model.draft, draft_vocab=model.vocabulary_size(target.spec))
    return Head(model.features.to(target.device).eval(), model.draft.to(target.device).eval(), target.record)


def _read_line() -> str:
    """Return the next line of the chat; "" at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
