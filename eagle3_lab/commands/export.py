"""`export`: a trained head as a folder that engines serve; a draft language model as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch

from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.formats.description import describe
from eagle3_lab.formats.writing import ENGINES, Format, require_absent, write
from eagle3_lab.interfaces import CausalDraft
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.find_head import find_head, run_folder
from eagle3_lab.pipeline.log_results import CLOSING_JSON
from eagle3_lab.pipeline.model_card import model_card
from eagle3_lab.system.files import read_object
from eagle3_lab.training import checkpoint


def export(
    experiment: Experiment,
    *,
    folder: Path,
    to: Format = ENGINES,
    checkpoint_path: Path | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Write a trained head in a format that others load. A draft language model is written with the target's
    tokenizer, as transformers reads it. Beside a head lies a model card, README.md, with what its run measured.

    Args:
        experiment: whose head.
        folder: where to; it must not be there yet.
        to: the format. engines: one folder that vLLM and SGLang both take; official: its authors' layout, which
            SpecForge and `speculators convert` read too; sglang; vllm; speculators.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment.
        dtype: of the weights written; by default as they were trained.

    Raises:
        UserError: no trained head, one that the format cannot hold, or a folder that is there or cannot be written.
    """
    _, model, _, _ = experiment.require_training("export")
    source, draft = model.features, model.draft
    if isinstance(draft, CausalDraft) and (to != ENGINES or dtype is not None):
        raise UserError(f"export: {type(draft).__name__} is a model by itself, in transformers' layout; leave out --to")
    require_absent(folder)
    target = inputs.load_target(experiment)
    data = inputs.build_data(experiment, target, answer=False)
    own = run_folder(experiment, target, data)
    measured = read_object(own.folder / CLOSING_JSON) if checkpoint_path is None else {}
    size = model.vocabulary_size(target.spec)
    if checkpoint_path is None:
        checkpoint.restore(own.draft, target, source, draft, draft_vocab=size)
    else:
        find_head(str(checkpoint_path), experiment, target).load(target, source, draft, draft_vocab=size)
    if isinstance(draft, CausalDraft):
        draft.lm.save(folder)
        print(f"{folder}: {draft.lm.spec.name}", file=sys.stderr)
        return
    head = describe(target, source, draft, None if dtype is None else getattr(torch, dtype))
    config = "" if experiment.config is None else experiment.config.logged_yaml
    card = model_card(head, to, target.spec.name, folder, data.manifest(), config, measured)
    write(folder, head, target, to, {"README.md": card})
    print(f"{folder}: {head.kind} head for {target.spec.name}, format {to}", file=sys.stderr)


export.positional = "folder"  # pyright: ignore[reportFunctionMemberAccess]
