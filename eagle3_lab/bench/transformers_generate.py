"""transformers' own fast generation, to be measured beside ours: assisted decoding, prompt lookup, batches.

The first two greedy, one prompt at a time, on the very model object that our decoder uses. Which settings are theirs at
their best differs from machine to machine, so several are offered, and the fastest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from eagle3_lab.target_model.attention import stock_attention
from eagle3_lab.target_model.hf_target import HFTarget

AS_LOADED = ", as it loads models"
PLAIN, LOOKUP, ASSISTED = "transformers", "transformers prompt lookup", "transformers assisted"


@dataclass(frozen=True)
class Rival:
    """One way of transformers' `generate`. ``options`` go to it as they are; ``assistant`` is the draft model, whose
    own generation settings are ``drafting``. ``beside``: our methods that do the same. ``on``: whose model it runs;
    None: the very one that our decoder runs."""

    name: str
    setting: str
    options: dict[str, int] = field(default_factory=dict)
    assistant: HFTarget | None = None
    drafting: dict[str, int | float | str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    on: HFTarget | None = None

    @torch.inference_mode()
    def answer(self, target: HFTarget, ids: Sequence[int], tokens: int) -> list[int]:
        """At most ``tokens`` tokens, the end token included."""
        prompt = torch.tensor([list(ids)], device=target.device)
        more: dict[str, object] = dict(self.options)
        target = self.on or target
        models = [target.model]
        if self.assistant is not None:
            models.append(self.assistant.model)
            self.assistant.model.generation_config.update(**self.drafting)  # pyright: ignore[reportArgumentType]
            more["assistant_model"] = self.assistant.model
        ends = list(target.spec.end_tokens)
        with stock_attention(*models):
            made = target.model.generate(  # pyright: ignore[reportCallIssue]  what a model mixes in, the type hides
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **more,
            )
        return made[0, len(ids) :].tolist()


def plain() -> Rival:
    """No drafts: what the others are faster than, if they are."""
    return Rival(PLAIN, "greedy")


def lookups() -> list[Rival]:
    """Prompt lookup by draft length and longest n-gram; 10 and 2 are transformers' examples and default."""
    return [
        Rival(LOOKUP, f"{n} tokens, n-gram {g}", {"prompt_lookup_num_tokens": n, "max_matching_ngram_size": g})
        for n, g in ((10, 2), (10, 3), (5, 3), (3, 2))
    ]


def assisted(draft: HFTarget) -> list[Rival]:
    """A draft model: transformers' defaults, and fixed and adaptive lengths without its confidence threshold."""
    settings: list[dict[str, int | float | str]] = [
        {
            "num_assistant_tokens": 20,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.4,
        },
        {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0},
        {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0},
        {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0},
    ]
    return [
        Rival(ASSISTED, ", ".join(str(value) for value in setting.values()), assistant=draft, drafting=setting)
        for setting in settings
    ]


CACHES = ("dynamic", "static")


@dataclass(frozen=True)
class Batched:
    """What many prompts are answered under: in batches of ``rows``, ``tokens`` an answer, fewer where one of ``ends``
    comes before; ``temperature`` 0 is greedy, ``top_p`` None is off."""

    prompts: Sequence[Sequence[int]]
    rows: int
    tokens: int
    ends: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float | None = None

    def generate(self, model: PreTrainedModel, cache: str, tokens: int | None = None) -> list[tuple[int, ...]]:
        """The answers of transformers' `generate`, batches sorted by length and padded to the left; ``tokens`` in place
        of the own number."""
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        made: dict[int, tuple[int, ...]] = {}
        with torch.random.fork_rng(enabled=self.temperature > 0):
            if self.temperature > 0:
                torch.manual_seed(0)
            for begin in range(0, len(order), self.rows):
                batch = order[begin : begin + self.rows]
                said = self._batch(model, [self.prompts[i] for i in batch], cache, tokens or self.tokens)
                made |= dict(zip(batch, map(self._ended, said), strict=True))
        return [made[i] for i in range(len(self.prompts))]

    @torch.inference_mode()
    def _batch(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], cache: str, tokens: int
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        law: dict[str, object] = {"do_sample": False}
        if self.temperature > 0:
            law = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}
        beyond = model.get_output_embeddings().weight.shape[0]  # an end that never comes: None would mean the model's
        with stock_attention(model):
            made = model.generate(  # pyright: ignore[reportCallIssue]  what a model mixes in, the type hides
                torch.tensor(padded, device=model.device),
                attention_mask=torch.tensor(seen, device=model.device),
                max_new_tokens=tokens,
                eos_token_id=list(self.ends) or beyond,
                pad_token_id=0,
                cache_implementation=cache,
                **law,
            )
        return made[:, width:].tolist()

    def _ended(self, said: Sequence[int]) -> tuple[int, ...]:
        """Up to the first end, without what fills the batch behind it."""
        first = next((i for i, token in enumerate(said) if token in self.ends), len(said))
        return tuple(said[: first + 1])
