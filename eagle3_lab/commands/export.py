"""`export`: a trained draft language model as an ordinary Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.interfaces import CausalDraft
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.run_folder import Work
from eagle3_lab.training import checkpoint


def export(experiment: Experiment, *, folder: Path, checkpoint_path: Path | None = None) -> None:
    """Write a trained draft language model with the target's tokenizer, as transformers reads it.

    Args:
        experiment: whose draft.
        folder: where to; it must not be there yet.
        checkpoint_path: the trained draft; by default the one that `fit` made of this very experiment.

    Raises:
        UserError: no trained draft, one that is no language model, or a folder that cannot be written.
    """
    _, model, _, _ = experiment.require_training("export")
    source, draft = model.features, model.draft
    if not isinstance(draft, CausalDraft):
        raise UserError(f"export: {type(draft).__name__} reads its target's features and is no model by itself")
    target = inputs.load_target(experiment)
    if checkpoint_path is None:
        checkpoint_path = Work.of(experiment, target, inputs.build_data(experiment, target, answer=False)).draft
    checkpoint.restore(checkpoint_path, target, source, draft, draft_vocab=model.vocabulary_size(target.spec))
    draft.lm.save(folder)
    print(f"{folder}: {draft.lm.spec.name}", file=sys.stderr)


export.positional = "folder"  # pyright: ignore[reportFunctionMemberAccess]
