"""What every verb begins from: the target, and the conversations. Each is made where it is missing and reused where it
is there, and says which."""

from __future__ import annotations

from pathlib import Path

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.document_cache import DocumentCache
from eagle3_lab.data.module import PREPARED, ConversationData
from eagle3_lab.data.overlap import measured_on
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.system import distributed
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.embedded import cache_folder
from eagle3_lab.target_model.hf_target import HFTarget


def load_target(experiment: Experiment) -> HFTarget:
    """The target, fetched and converted on first use."""
    with stage("target", "models", 1, experiment.budgets.get("target")) as s:
        if experiment.target.is_made():
            s.reused()
        elif not distributed.is_first():
            distributed.wait_for(experiment.target.is_made)
        target = experiment.target.load()
        s.advance()
    return target


def build_data(experiment: Experiment, target: HFTarget, *, answer: bool = True) -> ConversationData:
    """The experiment's conversations, and the fresh answers beside them, for this target. ``answer`` False: nothing is
    made; answers that are not there yet are left out. The experiment must have ``data``.

    Raises:
        UserError: a template or data that cannot be trained on, or a folder for answers that cannot be written.
    """
    assert experiment.data is not None
    chat = Chat(target.tokenizer)
    file = prepared_file(experiment, target, chat, make=answer)
    beside: list[Path] = []
    if experiment.answers is not None:
        place = experiment.answers.place(target, chat, _answers_folder())
        if answer or place.is_file():
            beside = [_answer(experiment, target, chat)]
    measured = None if experiment.evaluate is None else measured_on(experiment.evaluate.tasks)
    cache = DocumentCache(cache_folder() / "documents", writes=answer and distributed.is_first())
    experiment.data.build(chat, target.spec, beside, file=file, measured=measured, cache=cache)
    return experiment.data


def prepared_file(experiment: Experiment, target: HFTarget, chat: Chat, *, make: bool = True) -> Path | None:
    """What the ``prepare`` section makes, made now if it is not there; None where there is no such section.

    Raises:
        UserError: ``data.path`` and ``prepare`` that contradict each other, a file that is not there and not to be
            made, or what `Preparation.make` refuses.
    """
    assert experiment.data is not None
    if experiment.prepare is None:
        if experiment.data.path == PREPARED:
            raise UserError(f"data.path: {PREPARED!r}, but the experiment has no prepare section; write one, or a file")
        return None
    if experiment.data.path != PREPARED:
        raise UserError(
            f"data.path: {experiment.data.path!r}, but there is a prepare section; write data.path: {PREPARED}, or none"
        )
    folder = cache_folder() / "prepared"
    place = experiment.prepare.place(target, chat, folder)
    if not distributed.is_first():
        distributed.wait_for(place.is_file)
    if not place.is_file() and not make:
        raise UserError(f"prepare: {place} is not made yet; run the verb prepare first")
    experiment.data.check(chat, target.spec)
    budget = experiment.budgets.get("answers")
    if place.is_file():
        with stage("answers", "turns", budget_s=budget) as s:
            s.reused()
    return experiment.prepare.make(target, chat, folder, experiment.target.load, budget)


def _answers_folder() -> Path:
    return cache_folder() / "answers"


def _answer(experiment: Experiment, target: HFTarget, chat: Chat) -> Path:
    assert experiment.answers is not None
    folder = _answers_folder()
    total = len(experiment.answers.questions())
    with stage("answers", "prompts", total, experiment.budgets.get("answers")) as s:
        place = experiment.answers.place(target, chat, folder)
        if not distributed.is_first():
            distributed.wait_for(place.is_file)
        if place.is_file():
            s.reused()
        return experiment.answers.make(target, chat, folder, on_answer=lambda tokens: s.advance(1, tokens=tokens))
