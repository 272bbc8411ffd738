"""The inputs of every verb: the target and the conversations. What is missing is made, what exists is used."""

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
    """Return the target, which the first use fetches and converts."""
    with stage("target", "models", 1, experiment.budgets.get("target")) as s:
        if experiment.target.is_made():
            s.reused()
        elif not distributed.is_first():
            distributed.wait_for(experiment.target.is_made)
        target = experiment.target.load()
        s.advance()
    return target


def build_data(experiment: Experiment, target: HFTarget, *, answer: bool = True) -> ConversationData:
    """Build the experiment's conversations for this target, with the target's responses to the prompts of ``prepare``
    and ``answers``.

    Args:
        experiment: with a ``data`` section.
        target: of the experiment.
        answer: let the target answer prompts whose responses are missing; False: leave them out, and write no cache.

    Raises:
        UserError: a template or data that cannot be trained on, or a cache folder that cannot be written.
    """
    assert experiment.data is not None
    chat = Chat(target.tokenizer)
    file = prepared_file(experiment, target, chat, make=answer)
    answers = None if experiment.answers is None else _answers(experiment, target, chat, make=answer)
    measured = None if experiment.evaluate is None else measured_on(experiment.evaluate.tasks)
    cache = DocumentCache(cache_folder() / "documents", writes=answer and distributed.is_first())
    more = [] if answers is None else [answers]
    experiment.data.build(chat, target.spec, more, file=file, measured=measured, cache=cache)
    return experiment.data


def prepared_file(experiment: Experiment, target: HFTarget, chat: Chat, *, make: bool = True) -> Path | None:
    """Return the file of conversations that the ``prepare`` section makes; None without that section.

    Args:
        experiment: with a ``data`` section.
        target: of the experiment.
        chat: the target's template.
        make: make the file if it is missing.

    Raises:
        UserError: ``data.path`` and ``prepare`` that contradict each other, a missing file with ``make`` False, or as
            `Preparation.make`.
    """
    assert experiment.data is not None
    if experiment.prepare is None:
        if experiment.data.path == PREPARED:
            raise UserError(
                f"data.path: {PREPARED!r}, but the experiment has no prepare section; add it, or name a file"
            )
        return None
    if experiment.data.path != PREPARED:
        raise UserError(
            f"data.path: {experiment.data.path!r}, but there is a prepare section; set data.path: {PREPARED}, or "
            "remove the section"
        )
    folder = cache_folder() / "prepared"
    place = experiment.prepare.place(target, chat, folder)
    if not distributed.is_first():
        distributed.wait_for(place.is_file)
    if not place.is_file() and not make:
        raise UserError(f"prepare: {place} is not made yet; run `python -m eagle3_lab prepare` first")
    experiment.data.check(chat, target.spec)
    budget = experiment.budgets.get("answers")
    if place.is_file():
        with stage("answers", "turns", budget_s=budget) as s:
            s.reused()
    return experiment.prepare.make(target, chat, folder, experiment.target.load, budget)


def _answers(experiment: Experiment, target: HFTarget, chat: Chat, *, make: bool) -> Path | None:
    """Return the file of the ``answers`` section; None where it is missing and ``make`` is False."""
    answers, folder = experiment.answers, cache_folder() / "answers"
    assert answers is not None
    place = answers.place(target, chat, folder)
    if not make and not place.is_file():
        return None
    with stage("answers", "prompts", len(answers.questions()), experiment.budgets.get("answers")) as s:
        if not distributed.is_first():
            distributed.wait_for(place.is_file)
        if place.is_file():
            s.reused()
        return answers.make(target, chat, folder, on_answer=lambda tokens: s.advance(1, tokens=tokens))
