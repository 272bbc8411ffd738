"""A head written as a folder: a table of formats, and one way to write any of them, whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from eagle3_lab.errors import UserError
from eagle3_lab.formats import engines, official, speculators
from eagle3_lab.formats.description import EMBEDDING, HeadDescription
from eagle3_lab.formats.files import CONFIG, MEDUSA, WEIGHTS
from eagle3_lab.target_model.hf_target import HFTarget

Writer = Callable[[HeadDescription, HFTarget], tuple[dict[str, Any], dict[str, Tensor]]]

Format = Literal["engines", "official", "sglang", "vllm", "speculators"]

ENGINES: Format = "engines"
WRITERS: dict[Format, Writer] = {
    ENGINES: engines.write_both,
    "official": official.write,
    "sglang": engines.write_sglang,
    "vllm": engines.write_vllm,
    "speculators": speculators.write,
}
"""What `--to` names -> how a head is laid out. The first one is what vLLM and SGLang both read."""


def write(
    folder: Path,
    head: HeadDescription,
    target: HFTarget,
    to: Format = ENGINES,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a head as ``folder``, which must not be there yet: ``config.json``, the tensors, and ``texts`` by name.

    Args:
        folder: where to.
        head: `describe` of the parts.
        target: the parts were built for.
        to: a name in `WRITERS`.
        texts: further files, such as a model card.

    Raises:
        UserError: what the format cannot hold, or a folder that is there or cannot be written.
    """
    require_absent(folder)
    try:
        config, tensors = WRITERS[to](head, target)
    except (ValueError, UserError) as error:
        raise UserError(f"{folder}: the format {to} cannot hold this {head.kind} head: {error}") from None
    if head.kind != "Medusa":  # for people: no engine reads it
        config["embed_tokens"] = "in the file" if EMBEDDING in tensors else "the target's"
    config["torch_dtype"] = str(head.dtype).removeprefix("torch.")
    weights = f"{MEDUSA}.safetensors" if head.kind == "Medusa" and to == "official" else WEIGHTS
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            save_file(tensors, beside / weights, metadata={"format": "pt"})  # a second entry has no fixed order
            texts = {CONFIG: json.dumps(config, indent=2) + "\n", **(texts or {})}
            for name, text in texts.items():
                (beside / name).write_text(text, encoding="utf-8")
            beside.chmod(0o755)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def require_absent(folder: Path) -> None:
    """Raise UserError where something is there already."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: is there already; remove it, or name another folder")
