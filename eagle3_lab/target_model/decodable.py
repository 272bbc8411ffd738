"""What a causal LM must have to be decoded by trees: its text decoder, its blocks, its context, and why it is refused.

Only what a model and its configuration name is read here. What no configuration says, the probe measures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.windows import FULL, SLIDING

if TYPE_CHECKING:
    import transformers  # takes a second

NO_LIMIT = 2**31 - 1
"""The context of a model that names none and has no table of positions."""

_UNSOUND_ROPE = ("dynamic", "longrope")  # their angles depend on the longest row of the batch

_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "context_length",
)
"""Names that families give to the number of positions they were made for."""


def text_config(model: transformers.PreTrainedModel) -> transformers.PreTrainedConfig:
    """Return the configuration of the decoder that reads text, of a model with several towers too."""
    return model.config.get_text_config(decoder=True)


def text_decoder(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return the module that turns token ids into last hidden states: the outermost one without the head that has the
    text's configuration. Of a model with several towers that is the text tower.

    Raises:
        UserError: no such module.
    """
    from transformers import PreTrainedModel

    kind, head = type(text_config(model)), model.get_output_embeddings()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or type(module.config) is not kind:
            continue
        if head not in set(module.modules()):
            return module
    raise UserError(f"target: {type(model).__name__} has no text decoder beside its head, so trees cannot decode it")


def cache_argument(decoder: nn.Module) -> str | None:
    """Return the name under which a decoder takes a cache, which differs between versions; None where it takes none."""
    parameters = inspect.signature(decoder.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def decoder_blocks(model: transformers.PreTrainedModel) -> nn.ModuleList:
    """Return the one list of decoder blocks.

    Raises:
        UserError: none or several lists of that length, those inside a block (experts) not counted.
    """
    found = _lists_of_blocks(model)
    if len(found) != 1:
        count = text_config(model).num_hidden_layers
        raise UserError(f"target: {len(found)} lists of {count} blocks found in {type(model).__name__}, one is needed")
    return found[0]


def _lists_of_blocks(model: transformers.PreTrainedModel) -> list[nn.ModuleList]:
    count = text_config(model).num_hidden_layers
    decoder = text_decoder(model)
    lists = {n: m for n, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    return [m for name, m in lists.items() if not any(name.startswith(f"{outer}.") for outer in lists)]


def require_decodable(model: transformers.PreTrainedModel, name: str) -> None:
    """Raise UserError with every reason why trees cannot decode this model, in one line."""
    if reasons := refusals(model):
        raise UserError(f"target {name}: {'; '.join(reasons)}; a decoder with full attention would be right")


def refusals(model: transformers.PreTrainedModel) -> list[str]:
    """Return why a model cannot be decoded by trees with our mask and cache; empty where nothing speaks against it."""
    config, decoder = text_config(model), text_decoder(model)
    fields = config.to_dict()
    types = set(fields.get("layer_types") or ()) - {FULL, SLIDING}
    ropes = _rope_types(fields.get("rope_parameters") or {})
    attention = model.config._attn_implementation
    capped = bool(fields.get("attn_logit_softcapping"))
    kinds = _other_cache_layers(config)
    parameters = inspect.signature(decoder.forward).parameters
    found = {
        f"cache layers {kinds}": bool(kinds),
        f"layer types {sorted(types)}": bool(types),
        "recurrent state": model._is_stateful,
        "no cache": cache_argument(decoder) is None,
        "no position_ids": "position_ids" not in parameters,
        "ALiBi": bool(fields.get("alibi")),
        "an encoder": bool(fields.get("is_encoder_decoder")),
        "attention to later tokens": any(vars(module).get("is_causal") is False for module in decoder.modules()),
        **{f"rope type {rope!r}": rope in _UNSOUND_ROPE for rope in ropes},
        f"soft-capped attention under {attention}, which drops the cap (eager keeps it)": capped
        and attention != "eager",
    }
    return [reason for reason, holds in found.items() if holds] or _unusual_parts(model)


def _other_cache_layers(config: transformers.PreTrainedConfig) -> list[str]:
    """Names of the cache layers that transformers would make for a configuration, but for plain and windowed ones."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # noqa: BLE001 - whatever a family's configuration lacks
        return [f"that cannot be made ({type(error).__name__})"]
    return sorted(
        {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    )


def _unusual_parts(model: transformers.PreTrainedModel) -> list[str]:
    """Name what the adapter reads of a model and does not find: blocks, embedding and head of one width."""
    hidden, lists = text_config(model).hidden_size, len(_lists_of_blocks(model))
    tables = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    found = (
        [f"{lists} lists of {text_config(model).num_hidden_layers} blocks where one is needed"] if lists != 1 else []
    )
    for name, table in tables.items():
        weight = None if table is None else (table._parameters | table._buffers).get("weight")
        if weight is None or weight.ndim != 2:
            found.append(
                f"an {name} that is no table of vectors" if name == "embedding" else "a head that is no matrix"
            )
        elif weight.shape[1] != hidden:
            found.append(f"{name} of width {weight.shape[1]} beside hidden states of width {hidden}")
    return found


def _rope_types(entry: dict[str, Any]) -> set[str | None]:
    """One rope for all layers, or one for each layer type."""
    each = [value for value in entry.values() if isinstance(value, dict)]
    return {one.get("rope_type") for one in (each or [entry])}


def max_positions(model: transformers.PreTrainedModel) -> int:
    """Return how many positions a model has: the least number that its configuration names for it and that its tables
    of learned positions have rows for.

    Raises:
        UserError: a model with further tables whose forward fails.
    """
    fields = text_config(model).to_dict()
    named = [fields[name] for name in _CONTEXT if isinstance(fields.get(name), int) and fields[name] > 0]
    return min([*named, *_position_rows(model), NO_LIMIT])


class _TablesOfPositions(TorchDispatchMode):
    """Note how many positions each table has rows for that is read at two positions, 0 and 1, or at a fixed number of
    rows behind them. Module hooks would miss tables whose class takes other arguments than an index."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Mapping | None = None
    ) -> object:
        if func is torch.ops.aten.embedding.default:
            table, index = args[:2]
            if index.numel() == 2 and int(index.reshape(-1).diff()) == 1:
                self.rows.append(table.shape[0] - int(index.min()))
        return func(*args, **(kwargs or {}))


def _position_rows(model: transformers.PreTrainedModel) -> list[int]:
    """Run two tokens through a decoder that has tables beside its embedding; how many positions each has rows for."""
    decoder, embedding = text_decoder(model), model.get_input_embeddings()
    if not any(isinstance(m, nn.Embedding) and m is not embedding for m in decoder.modules()):
        return []
    position = torch.arange(2, device=model.device)[None]
    with forward_in_one_line(type(model).__name__), torch.no_grad(), _TablesOfPositions() as tables:
        decoder(input_ids=torch.zeros_like(position), position_ids=position)
    return tables.rows


@contextmanager
def forward_in_one_line(name: str) -> Iterator[None]:
    """Turn what a family's own code raises under our mask, positions and cache into one line that names the target."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the code of some two hundred families, each with its own assumptions
        message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UserError(
            f"target {name}: its forward cannot be run by trees ({message}); choose another target"
        ) from error
