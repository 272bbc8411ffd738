"""The module that is trained: a new head of the experiment's parts, with its first weights and its loss."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.backend.compile import require_compiler
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.draft.vocab import choose
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.find_head import start_head
from eagle3_lab.pipeline.named_experiments import at
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.module import DraftModule


def check_compiler(experiment: Experiment) -> None:
    """Check, before target and data are loaded, that ``model.compile`` can be done. Raises UserError as
    `require_compiler`."""
    if experiment.model is not None and experiment.model.compile:
        device = experiment.target.device
        require_compiler(torch.cuda.is_available() if device == "auto" else device.startswith("cuda"))


def build_module(experiment: Experiment, target: HFTarget, data: ConversationData) -> DraftModule:
    """Build the head for this target, on its device. Its weights are drawn from the experiment's seed, or are those of
    ``model.start`` or ``model.public``.

    Raises:
        UserError: options that contradict each other or do not fit the target or the data, or a start head of other
            parts or for another target.
    """
    model = experiment.model
    assert model is not None and experiment.optimizer is not None
    for key, depth in (("model.unroll.depth", model.unroll.depth), ("judged_depth", experiment.judged_depth)):
        if depth >= data.row_length:
            raise UserError(
                f"{key}: {depth}, but a row has {data.row_length} tokens; lower it, or raise data.row_length"
            )
    torch.manual_seed(experiment.seed)
    try:
        _build_parts(experiment, target, data)
        module = DraftModule(
            target,
            model.features,
            model.draft,
            model.unroll,
            model.loss(),
            experiment.optimizer,
            noise=model.noise,
            seed=experiment.seed,
            judged_depth=experiment.judged_depth,
            compiled=model.compile,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return module.to(target.device)


def _build_parts(experiment: Experiment, target: HFTarget, data: ConversationData) -> None:
    """Build the model's feature source and draft, with their first weights."""
    model = experiment.model
    assert model is not None
    start = start_head(experiment, target)
    if start is None:
        width = model.features.build(target)
        model.draft.build(target, width, draft_vocabulary(experiment, target, data).to(target.device))
        return
    try:
        start.load(target, model.features, model.draft, draft_vocab=model.vocabulary_size(target.spec))
    except UserError as error:
        key = "model.public" if model.start is None else "model.start"
        raise UserError(f"{at(experiment, key)}: {error}") from None


def draft_vocabulary(experiment: Experiment, target: HFTarget, data: ConversationData) -> Int[Tensor, " Vd"]:
    """Return the target ids that the draft can predict. Raises ValueError for a size that is not possible."""
    assert experiment.model is not None
    size = experiment.model.vocabulary_size(target.spec)
    always = sorted({*Chat(target.tokenizer).kept_ids, *target.spec.end_tokens})
    return choose(data.token_counts(), size, always, target.spec.real_vocab)
