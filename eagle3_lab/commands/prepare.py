"""`prepare`: from prompts to what is trained on, with a look at it before anything is."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_lab.data.documents import Document
from eagle3_lab.data.generation.prepared_file import manifest_of, read_manifest
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.data_card import card_text, data_card
from eagle3_lab.pipeline.head_module import draft_vocabulary
from eagle3_lab.system.files import file_lock, require_place, write_text
from eagle3_lab.system.terminal import Ink

if TYPE_CHECKING:
    import transformers  # takes a second


def prepare(experiment: Experiment, *, show: int = 0, output: Path | None = None) -> None:
    """Make the conversations that an experiment trains on, and print their data card.

    What the ``prepare`` section makes lies in the cache, where `fit` finds it; without that section the card is of the
    file that ``data.path`` names. A killed command goes on where it was.

    Args:
        experiment: whose target, prompts and data.
        show: also print so many training conversations as tokens, what is supervised in colour.
        output: also write the file there, with its manifest and card beside it.

    Raises:
        UserError: a mistake in the experiment, its prompts, its server or its target, a disk that is full, or another
            process at the same output.
    """
    if show < 0:
        raise UserError(f"--show: must be >= 0, got {show}")
    _require_ours(output)
    if experiment.data is None or experiment.model is None:
        missing = "data" if experiment.data is None else "model"
        raise UserError(f"prepare: the experiment has no {missing} section; add what a head would be trained with")
    if output is not None and experiment.prepare is None:
        raise UserError(f"--output: {output}: nothing is prepared here; a prepare section is needed")
    with _held(output):
        _prepare(experiment, show, output)


def _prepare(experiment: Experiment, show: int, output: Path | None) -> None:
    target = inputs.load_target(experiment)
    data = inputs.build_data(experiment, target)
    try:
        vocabulary = draft_vocabulary(experiment, target, data)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    card = data_card(data, vocabulary, target.spec.vocab)
    print(card_text(card), end="")
    if experiment.prepare is not None:
        file = data.file
        print(f"conversations: {file}\nmanifest: {manifest_of(file)}")
        if output is not None:
            _write(output, file, card)
    for number, document in enumerate(data.train[:show], 1):
        print(f"\n--- {number}: {document.conversation.id}")
        show_document(document, target.tokenizer, Ink(sys.stdout))


def show_document(document: Document, tokenizer: transformers.PreTrainedTokenizerBase, ink: Ink) -> None:
    """A document's text, supervised tokens in colour; where there are no colours, between double brackets."""
    pairs = zip(document.ids.tolist(), document.supervised.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        text = _visible(str(tokenizer.decode([token for token, _ in run])))
        ink.write(f"[[{text}]]" if supervised and not ink.colours else text, drafted=supervised)
    ink.write("\n")


def _visible(text: str) -> str:
    """Control characters as their escapes: a text must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _require_ours(output: Path | None) -> None:
    """Refuse a place that cannot be written, or holds what no `prepare` wrote: it might be the prompts themselves."""
    require_place(output, "--output")
    if output is not None and output.suffix == ".gz":
        raise UserError(f"--output: {output}: plain text is written; name a file without .gz")
    if output is not None and output.exists() and not manifest_of(output).is_file():
        raise UserError(f"--output: {output} is there and has no {manifest_of(output).name} beside it; name a new file")


def _held(output: Path | None) -> AbstractContextManager[object]:
    """Within, no other process prepares into ``output``: its three files belong together. Raises UserError."""
    if output is None:
        return nullcontext()
    place = output.resolve()
    busy = f"--output: {output} is being written by another process; wait for its end, or name another file"
    try:
        return file_lock(place.with_name(f".{place.name}.lock"), busy)
    except OSError as error:
        reason = f"--output: {output} cannot be written ({error.strerror})"
        raise UserError(f"{reason}; name a file that can be written") from None


def _write(output: Path, file: Path, card: dict) -> None:
    write_text(output, file.read_text("utf-8"))
    write_text(manifest_of(output), json.dumps(read_manifest(file), indent=2) + "\n")
    write_text(output.with_name(f"{output.name.partition('.jsonl')[0]}.card.json"), json.dumps(card, indent=2) + "\n")
