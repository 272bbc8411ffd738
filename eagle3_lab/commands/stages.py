"""The stages that verbs are made of: target, data, head, closing table. Each reports itself, and reuses what is
there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from eagle3_lab import checkpoint
from eagle3_lab.commands.callbacks import Interrupts, Reporter
from eagle3_lab.commands.work import Work, require_room
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import PREPARED, ConversationData
from eagle3_lab.data.overlap import measured_on
from eagle3_lab.decode.methods import Head, Vanilla
from eagle3_lab.draft.vocab import choose
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation import VANILLA, Contestant, Evaluation, Turn, check, count_turns, measure
from eagle3_lab.experiment import Experiment
from eagle3_lab.hits import HitReading, read_hits
from eagle3_lab.intervals import ratio_interval
from eagle3_lab.lightning_logger import RunLogger
from eagle3_lab.progress import stage
from eagle3_lab.report.table import Answered, ClosingTable, MethodResult, OnePass, method_result
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.target.embedded import cache_folder
from eagle3_lab.tracking import Run, ui_command
from eagle3_lab.train import DraftModule
from eagle3_lab.training import quiet_lightning

# ------------------------------------------------------------------------------------------------- target and data


def load_target(experiment: Experiment) -> HFTarget:
    """The target, fetched and converted on first use."""
    with stage("target", "models", 1, experiment.budgets.get("target")) as s:
        if experiment.target.is_made():
            s.reused()
        target = experiment.target.load()
        s.advance()
    return target


def build_data(experiment: Experiment, target: HFTarget, *, answer: bool = True) -> ConversationData:
    """The experiment's conversations, and the fresh answers beside them, for this target. ``answer`` False: nothing is
    made; answers that are not there yet are left out.

    Raises:
        UserError: a template or data that cannot be trained on, or a folder for answers that cannot be written.
    """
    chat = Chat(target.tokenizer)
    file = prepared_file(experiment, target, chat, make=answer)
    beside: list[Path] = []
    if experiment.answers is not None:
        place = experiment.answers.place(target, chat, _answers_folder())
        if answer or place.is_file():
            beside = [_answer(experiment, target, chat)]
    measured = None if experiment.evaluate is None else measured_on(experiment.evaluate.tasks)
    experiment.data.build(chat, target.spec, beside, file=file, measured=measured)
    return experiment.data


def prepared_file(experiment: Experiment, target: HFTarget, chat: Chat, *, make: bool = True) -> Path | None:
    """What the ``prepare`` section makes, made now if it is not there; None where there is no such section.

    Raises:
        UserError: ``data.path`` and ``prepare`` that contradict each other, a file that is not there and not to be
            made, or what `Preparation.make` refuses.
    """
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
        if experiment.answers.place(target, chat, folder).is_file():
            s.reused()
        return experiment.answers.make(target, chat, folder, on_answer=lambda tokens: s.advance(1, tokens=tokens))


# ------------------------------------------------------------------------------------------------------- training


def build_module(experiment: Experiment, target: HFTarget, data: ConversationData) -> DraftModule:
    """A fresh head for this target: its weights drawn from the experiment's seed, or those of ``model.start``.

    Raises:
        UserError: options that contradict each other or do not fit the target or the data, or a ``model.start`` of
            other parts or of another target.
    """
    model = experiment.model
    torch.manual_seed(experiment.seed)
    try:
        width = model.features.build(target)
        vocab = draft_vocabulary(experiment, target, data)
        model.draft.build(target, width, vocab.to(target.device))
        if model.start is not None:
            checkpoint.restore(model.start, target, model.features, model.draft)
        module = DraftModule(
            target,
            model.features,
            model.draft,
            model.unroll,
            model.loss(),
            experiment.optimizer,
            noise=model.noise,
            seed=experiment.seed,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return module.to(target.device)


def draft_vocabulary(experiment: Experiment, target: HFTarget, data: ConversationData) -> Int[Tensor, " Vd"]:
    """The target ids that the draft will be able to say. Raises ValueError for a size that cannot be."""
    size = target.spec.vocab if experiment.model.draft_vocab is None else experiment.model.draft_vocab
    always = sorted({*Chat(target.tokenizer).kept_ids, *target.spec.end_tokens})
    return choose(data.token_counts(), size, always, min(len(target.tokenizer), target.spec.vocab))


def check_rows(module: DraftModule, data: ConversationData) -> None:
    """Refuse conversations that would train nothing. Raises UserError."""
    if not any(bool(module.loss.weights(batch, 1).any()) for batch in data.train_dataloader()):
        raise UserError(
            f"{data.path}: no row can be trained on with mask {module.loss.mask!r} within max_length "
            f"{data.max_length}: every answer ends before its second token; longer answers or a larger max_length are "
            "needed"
        )


def train_head(experiment: Experiment, module: DraftModule, data: ConversationData, run: Run, work: Work) -> None:
    """Train, going on from the last checkpoint of an interrupted run; ends with ``work.draft``. What is chosen on the
    way is tagged.

    Raises:
        UserError: no room on the disk, options that Lightning refuses, or a last checkpoint that is damaged.
        KeyboardInterrupt: Ctrl-C or SIGTERM; ``work.last`` is then the last step's.
    """
    require_room(work.folder, module)
    options = experiment.trainer
    options.check(len(data.train_dataloader()))
    precision, why = options.precision(next(module.parameters()).device)
    going_on = work.last if work.last.is_file() else None
    run.set_tags({"products": precision, "products_why": why, "resumed": str(going_on is not None).lower()})
    print(f"training: products in {precision} ({why})", file=sys.stderr)
    saver = ModelCheckpoint(
        dirpath=work.folder,
        filename=work.last.stem,
        train_time_interval=options.save_interval(),
        save_top_k=1,
        enable_version_counter=False,
        save_on_exception=True,
    )
    interrupts = Interrupts()
    with quiet_lightning(), stage("training", "steps", None, experiment.budgets.get("training")) as s:
        callbacks = [saver, Reporter(s), interrupts]
        trainer = options.make(RunLogger(run), callbacks, checkpoint.AtomicCheckpointIO(), precision, work.folder)
        try:
            with interrupts.caught():
                trainer.fit(module, datamodule=data, ckpt_path=going_on, weights_only=True)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {' '.join(str(error).split())}") from None
        trainer.save_checkpoint(work.draft, weights_only=True)


# ---------------------------------------------------------------------------------------------------- evaluation


def read_held_out(module: DraftModule, data: ConversationData) -> HitReading | None:
    """The hit table over all held-out greedy conversations, in the target's dtype; None where nothing is held out."""
    if not data.held_out:
        return None
    total = sum(map(len, data.held_out))
    with stage("hit table", "tokens", total) as s:
        batches = (batch for loader in data.val_dataloader() for batch in loader)
        return read_hits(module, batches, on_tokens=s.advance)


def check_evaluation(experiment: Experiment, target: HFTarget, data: ConversationData, module: DraftModule) -> None:
    """Refuse before training what could not be measured after it. Raises UserError."""
    if experiment.evaluate is not None:
        check(experiment.evaluate, target, Head(module.source, module.draft), data.prompts())


def decode_methods(
    experiment: Experiment, evaluation: Evaluation, target: HFTarget, head: Head | None, data: ConversationData | None
) -> tuple[MethodResult, ...]:
    """Every method's row, vanilla's first."""
    held_out = None if data is None else data.prompts()
    contestants = [Contestant(VANILLA, Vanilla(), target)]
    other = evaluation.other_dtype
    if other is not None and other != target.dtype:
        contestants.append(Contestant(f"{VANILLA} {_name(other)}", Vanilla(), experiment.target.load(other)))
    contestants += [Contestant(name, method, target, head) for name, method in evaluation.methods.items()]
    total = count_turns(evaluation, held_out) * len(contestants)
    with stage("evaluation", "answers", total, experiment.budgets.get("evaluation")) as s:
        turns = measure(contestants, evaluation, held_out, lambda turn: s.advance(1, tokens=len(turn.decoded.tokens)))
    answered = {name: _by_prompt(made) for name, made in turns.items()}
    fastest = max((c.name for c in contestants if isinstance(c.method, Vanilla)), key=lambda n: _rate(answered[n]))
    draw = torch.Generator().manual_seed(experiment.seed)
    rows = []
    for c in contestants:
        base = c.name if isinstance(c.method, Vanilla) else VANILLA
        row = (answered[c.name], answered[base], answered[fastest], c.method.levels)
        label = VANILLA if isinstance(c.method, Vanilla) else c.name
        rows.append(method_result(label, _name(c.target.dtype), *row, generator=draw))
    return tuple(rows)


def closing_table(
    experiment: Experiment,
    target: HFTarget,
    rows: Sequence[MethodResult],
    hits: HitReading | None,
    run: Run,
    draft: Path,
) -> ClosingTable:
    """Everything a run closes with."""
    evaluation = experiment.evaluate
    measured = []
    if evaluation is not None:
        tasks = ", ".join(task.name for task in evaluation.tasks)
        law = "greedy" if evaluation.law is None else str(evaluation.law)
        measured = [law, f"{tasks}: at most {evaluation.max_new_tokens} tokens an answer"]
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "CPU"
    threads = f"{device}, {torch.get_num_threads()} threads" if device == "CPU" else device
    return ClosingTable(
        setting="; ".join([f"{experiment.name}: target {target.spec.name}", threads, *measured]),
        methods=tuple(rows),
        one_pass=None if hits is None else one_pass(hits, experiment.seed),
        run_id=run.id,
        checkpoint=str(draft),
        ui=shlex.join(ui_command(experiment.tracking.folder)),
        page=run.page,
    )


def one_pass(hits: HitReading, seed: int) -> OnePass:
    """The hit table's two readings, with an interval over answers for the walked one."""
    depth = len(hits.visited.judged)
    emitted = [sum(r.emitted for r in rounds) for rounds in hits.answers]
    rounds = [len(made) for made in hits.answers]
    return OnePass(
        tau_expected=hits.readings["tau_expected"],
        tau_walked=ratio_interval(emitted, rounds, torch.Generator().manual_seed(seed)),
        n_alpha_all=tuple(hits.readings[f"step_{n}/n_alpha_all"] for n in range(depth)),
        n_alpha_walked=hits.visited.n_alpha,
    )


def table_metrics(table: ClosingTable) -> dict[str, float]:
    """The closing table as metrics: what the UI compares."""
    found: dict[str, float] = {}
    for row in table.methods:
        name = row.name if row.name != VANILLA else f"{VANILLA}_{row.dtype}"
        for what, value in (
            ("tau", row.tau),
            ("tokens_per_s", row.tokens_per_s),
            ("speedup", row.speedup),
            ("speedup_over_fastest", row.speedup_fastest),
        ):
            found |= {f"eval/{name}/{what}": value.value}
            found |= {f"eval/{name}/{what}_low": value.low, f"eval/{name}/{what}_high": value.high}
        found |= {f"eval/{name}/n_alpha_{n}": alpha for n, alpha in enumerate(row.n_alpha)}
    if table.one_pass is not None:
        walked = table.one_pass.tau_walked
        found |= {"eval/one_pass/tau_expected": table.one_pass.tau_expected, "eval/one_pass/tau_walked": walked.value}
        found |= {"eval/one_pass/tau_walked_low": walked.low, "eval/one_pass/tau_walked_high": walked.high}
        both = zip(table.one_pass.n_alpha_all, table.one_pass.n_alpha_walked, strict=True)
        for n, (every, visited) in enumerate(both):
            found |= {f"eval/one_pass/n_alpha_{n}_all": every, f"eval/one_pass/n_alpha_{n}_walked": visited}
    return found


def _by_prompt(turns: Sequence[Turn]) -> list[Answered]:
    """A prompt's turns together, in the order they were asked."""
    grouped: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        grouped.setdefault((turn.task, turn.prompt), []).append(turn)
    return [Answered(tuple(t.decoded for t in one), sum(t.seconds for t in one)) for one in grouped.values()]


def _rate(answered: Sequence[Answered]) -> float:
    return sum(a.tokens for a in answered) / sum(a.seconds for a in answered)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
