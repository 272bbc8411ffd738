"""One training step of vllm-project/speculators' EAGLE-3 at a time, in an environment of its own.

Run by its own Python, which knows nothing of eagle3_lab. Line by line over pipes, JSON both ways:

    <- {"hidden": 576, ..., "document": [0, 0, 1, ...], "supervised": [...], "dtype": "bfloat16", "threads": 1}
    -> {"versions": {...}, "attention": "eager", "parameters": 9800000}
    <- {"step": true}
    -> {"seconds": 3.2, "cpu_seconds": 3.1, "loss": 12.1, "peak_bytes": 900000000}

and so on until the pipe is closed. What is timed is the trainer's own sequence (speculators 0.9.0 train/trainer.py,
`_train_epoch`): forward under autocast, zero_grad, backward, clipping at 1.0, AdamW. On a CPU its eager attention and
its eager losses run, since FlexAttention has no backward there and the fused losses are Triton's; `torch.compile` is
off there by its own choice.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Answer requests until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    step = Step(json.loads(sys.stdin.readline()))
    print(json.dumps(step.described()), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(step()), file=answers, flush=True)


class Step:
    """A model of the asked-for shape on random weights and features, its optimizer, and one packed row."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(shape["threads"])
        torch.manual_seed(0)
        self._shape = shape
        self._device = torch.device(shape["device"])
        self._model = _model(shape, self._device)
        self._optimizer = torch.optim.AdamW(self._model.named_parameters(), lr=1e-4, weight_decay=0.01)
        fused = self._device.type == "cuda"
        self._options = {
            "ttt_steps": shape["depth"],
            "ttt_step_loss_decay": 0.8,
            "loss_config": resolve_loss_config("kl_div", "fused" if fused else "eager"),
        }
        self._batch = _batch(shape, self._device)

    def described(self) -> dict[str, Any]:
        """What is measured."""
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
        return {"versions": versions, "attention": self._model._attn_impl, "parameters": trained}

    def __call__(self) -> dict[str, Any]:
        """One step; the loss is read, so the device has finished."""
        self._wait()
        began, ran = time.perf_counter(), time.process_time()
        narrow = self._shape["dtype"] == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=narrow):
            _, loss, _ = self._model(**self._batch, **self._options)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._wait()
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - ran}
        return took | {"loss": float(loss.detach()), "peak_bytes": self._peak()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak(self) -> int | None:
        """On CUDA what tensors took at most; else the process's high-water mark, where the system tells it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        status = Path("/proc/self/status")
        if not status.is_file():
            return None
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024


def _model(shape: dict[str, Any], device: torch.device) -> Any:  # noqa: ANN401
    from speculators import SpeculatorsConfig, VerifierConfig  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        num_hidden_layers=shape["layers"],
        vocab_size=shape["vocab"],
        max_position_embeddings=max(8192, len(shape["document"])),
    )
    if device.type != "cuda":
        layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab"],
        eagle_aux_hidden_state_layer_ids=list(range(1, 1 + shape["taps"])),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape["depth"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():  # they are NaN until a verifier's are loaded
        for weights in (model.lm_head.weight, model.verifier_lm_head.weight, model.embed_tokens.weight):
            weights.normal_(std=0.02)
    return model.to(device).train()


def _batch(shape: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    rows, hidden = len(shape["document"]), shape["hidden"]
    document = torch.tensor([shape["document"]])
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(rows)[None]
    batch = {
        "hidden_states": torch.randn(1, rows, shape["taps"] * hidden),
        "verifier_last_hidden_states": torch.randn(1, rows, hidden),
        "input_ids": torch.randint(shape["vocab"], (1, rows)),
        "document_ids": document,
        "position_ids": 1 + index - torch.where(begins, index, 0).cummax(-1).values,
        "loss_mask": torch.tensor([shape["supervised"]]),
    }
    return {name: value.to(device) for name, value in batch.items()}


if __name__ == "__main__":
    main()
