"""`python -m eagle3_lab.commands.gpu_check`: everything that needs a GPU, in one command and one JSON.

Tests marked gpu; decoding and training on a random target of Llama-3.1-8B's shape, made on the device; graphs on
against off; what bfloat16 ties and flips. Needs torch, transformers, jaxtyping and pytest: no network, none of the
libraries that read configurations, load data or keep runs. ``--dry-run`` is the same path on a tiny target, on a CPU.

A part that fails is told in the JSON and does not stop the others; one for which the time is too short is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_lab.costs import Cycle, Idle, Laps, Meter, answer, curves
from eagle3_lab.decode.grow import DynamicTree
from eagle3_lab.decode.law import SamplingLaw
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.draft.layer import Eagle3
from eagle3_lab.draft.loss import UnrolledLoss
from eagle3_lab.draft.source import FusedFeature
from eagle3_lab.draft.terms import SoftCE
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.target.load import describe
from eagle3_lab.types import Batch, Needs

TESTS = Path(__file__).resolve().parents[2] / "tests"
LIMIT_S = 480.0


@dataclass(frozen=True)
class Sizes:
    """What is built and measured. The defaults are Llama-3.1-8B's and EAGLE-3's own."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    draft_vocab: int = 32000
    tree: tuple[int, int, int] = (8, 10, 60)  # levels, width, budget
    nodes: tuple[int, ...] = (1, 8, 26, 60)
    widths: tuple[int, ...] = (1, 10)
    context: int = 512
    tokens: int = 128
    rounds: int = 8
    repeats: int = 3
    rows: int = 2048  # of one training batch
    depth: int = 7
    steps: int = 5


TINY = Sizes("cpu", torch.float32, 32, 48, 8, 4, 2, 97, 64, (3, 2, 6), (1, 6), (1, 2), 12, 8, 3, 1, 48, 3, 2)


class Bench:
    """The target and the head under test, made once."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.device = torch.device(sizes.device)
        torch.manual_seed(0)
        self.model = self._model()
        self.target = self.wrapped(capture=False)
        self.source, self.draft = FusedFeature(), Eagle3()
        width = self.source.build(self.target)
        kept = torch.arange(sizes.draft_vocab, device=self.device) * (sizes.vocab // sizes.draft_vocab)
        self.draft.build(self.target, width, kept)
        nn.Module.to(self.source, self.device)
        nn.Module.to(self.draft, self.device)
        self.ids = torch.randint(sizes.vocab, (sizes.context,), generator=torch.Generator().manual_seed(1)).tolist()

    def wrapped(self, *, capture: bool) -> HFTarget:
        return HFTarget(self.model, None, describe(self.model, None, "random"), capture=capture)

    def eagle(self) -> Eagle:
        levels, width, budget = self.sizes.tree
        return Eagle(self.source, self.draft, DynamicTree(levels, width, budget), self.sizes.layers)

    def _model(self) -> LlamaForCausalLM:
        s = self.sizes
        config = LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  taken among the keyword arguments
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(s.dtype)
        try:
            with torch.device(self.device):
                return LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)


Part = Callable[[Bench], dict[str, object]]


def decoding(bench: Bench, *, capture: bool) -> dict[str, object]:
    """Curves, and vanilla and a dynamic tree by the real loop. A random head's tau says nothing; its costs do."""
    s = bench.sizes
    target, eagle = bench.wrapped(capture=capture), bench.eagle()
    draft_dtype = next(bench.draft.parameters()).dtype
    bench.draft.to(s.dtype)
    bench.source.to(s.dtype)
    law = SamplingLaw()
    meter = Meter(target, eagle, law, bench.ids, nodes=s.nodes, widths=s.widths, rounds=s.rounds)
    made = curves(meter, s.repeats)
    found: dict[str, object] = {"curves": asdict(made)}
    for name, proposer in (("vanilla", Vanilla()), ("tree", eagle)):
        clock = Laps(bench.device)
        answer(target, proposer, law, bench.ids, s.tokens, clock)
        decoded = answer(target, proposer, law, bench.ids, s.tokens, clock)
        cycle = Cycle.of(clock.rounds[1:])
        nodes = min(made.forward, key=lambda n: abs(n - proposer.nodes))
        host = cycle.host + max(cycle.verify - made.forward[nodes], 0.0)
        found[name] = {
            "tokens": len(decoded.tokens),
            "rounds": len(decoded.rounds),
            "tokens_per_s": len(decoded.tokens) / sum(clock.seconds().values()),
            "cycle": asdict(cycle),
            "host_share": host / cycle.seconds,
        }
    bench.draft.to(draft_dtype)
    bench.source.to(draft_dtype)
    return found


def agreement(bench: Bench) -> dict[str, object]:
    """Logits of graphs against plain forwards, and of one row against a whole tree's: largest differences, exact ties
    of the two likeliest tokens, and arg-maxima that differ (flips), over a random text's tokens as roots."""
    s = bench.sizes
    nodes = max(s.nodes)
    proposer = Idle(nodes, s.vocab)
    kinds = {"one": (bench.target, 1), "many": (bench.target, nodes)}
    if s.device == "cuda":
        kinds["graph"] = (bench.wrapped(capture=True), nodes)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in kinds}
    for i in range(s.rounds):
        ids = torch.tensor([bench.ids[i:] + bench.ids[:i]], device=bench.device)
        tree = proposer.propose(ids[:, i])
        for name, (target, count) in kinds.items():
            session = target.open(1, ids.shape[1] + nodes + 1, Needs(logits=True))
            session.prefill(ids, torch.tensor([ids.shape[1]], device=bench.device))
            shown = session.score(Idle(count, s.vocab).propose(tree.tokens[:, 0])).logits
            assert shown is not None
            logits[name].append(shown[0, 0].float())
    one = torch.stack(logits["one"])
    top = one.topk(2, dim=-1).values
    found: dict[str, object] = {
        "roots": s.rounds,
        "nodes": nodes,
        "largest_logit": one.abs().max().item(),
        "exact_ties": (top[:, 0] == top[:, 1]).sum().item(),
    }
    for name in set(kinds) - {"one"}:
        other = torch.stack(logits[name])
        found[name] = {
            "largest_difference": (other - one).abs().max().item(),
            "flips": (other.argmax(-1) != one.argmax(-1)).sum().item(),
        }
    return found


def training(bench: Bench) -> dict[str, object]:
    """Steps of the whole training path but for the trainer: features, unroll, loss, backward, AdamW."""
    s = bench.sizes
    ids = torch.randint(s.vocab, (1, s.rows), generator=torch.Generator().manual_seed(2)).to(bench.device)
    position = torch.arange(s.rows, device=bench.device)[None]
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), position, torch.zeros_like(ids))
    unroll, loss = Unroll(s.depth), UnrolledLoss([SoftCE(1.0)])
    parameters = [p for m in (bench.source, bench.draft) for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    needs = Needs(layers=bench.source.layers(s.layers), top=True)
    seconds, losses = [], []
    for _ in range(s.steps + 2):
        began = _now(bench.device)
        with torch.autocast(s.device, dtype=torch.bfloat16, enabled=s.dtype == torch.bfloat16):
            out = bench.target.features(batch, needs)
            assert out.top is not None
            steps = list(unroll(bench.draft, bench.source(out.taps), batch))
            total = loss(bench.draft, steps, batch, bench.target, out.top.to(bench.target.dtype)).total
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(_now(bench.device) - began)
        losses.append(total.item())
    best = sorted(seconds[2:])[len(seconds[2:]) // 2]
    return {"tokens": s.rows, "steps": s.steps, "step_s": best, "tokens_per_s": s.rows / best, "losses": losses}


def gpu_tests(timeout_s: float) -> dict[str, object]:
    """The tests marked gpu, in a process of their own; only files that hold such tests are collected."""
    files = sorted(str(f) for f in TESTS.rglob("test_*.py") if "mark.gpu" in f.read_text())
    plain = ["-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plain, *files]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=TESTS.parent, check=False)
    return {"exit": ran.returncode, "files": len(files), "output": ran.stdout[-4000:] + ran.stderr[-2000:]}


def run(sizes: Sizes, tests: bool, limit_s: float = LIMIT_S) -> dict[str, object]:
    """All parts, in the order of what is worth most should the time run out."""
    began = time.monotonic()
    found: dict[str, object] = {"machine": machine(sizes), "sizes": {k: str(v) for k, v in asdict(sizes).items()}}
    if tests:
        found["tests"] = _part("tests", lambda: gpu_tests(limit_s / 3), sizes.device)
    bench = Bench(sizes)
    parts: dict[str, Part] = {
        "decoding": lambda b: decoding(b, capture=False),
        "agreement": agreement,
        "training": training,
    }
    if sizes.device == "cuda":
        parts["decoding_captured"] = lambda b: decoding(b, capture=True)
    for name, part in parts.items():
        if time.monotonic() - began > 0.8 * limit_s:
            found[name] = {"skipped": f"{time.monotonic() - began:.0f} s of {limit_s:.0f} were gone"}
            continue
        found[name] = _part(name, lambda part=part: part(bench), sizes.device)
    found["seconds"] = time.monotonic() - began
    return found


def machine(sizes: Sizes) -> dict[str, object]:
    """Where this ran, and with what."""
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else platform.processor() or "CPU"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def _part(name: str, work: Callable[[], dict[str, object]], device: str) -> dict[str, object]:
    """Run one part; what it raises is told in its place, since the parts after it still can."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, object]
    try:
        found = work()
    except Exception:  # noqa: BLE001 (whatever it is, it belongs into the findings)
        found = {"failed": traceback.format_exc()[-3000:]}
    if device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    gc.collect()
    found["seconds"] = time.monotonic() - began
    print(f"{name}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
    return found


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def main(argv: list[str] | None = None) -> int:
    """0: all parts ran; 1: one failed or was skipped; 2: there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_lab.commands.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the findings are written")
    parser.add_argument("--dry-run", action="store_true", help="the same path on a tiny target, on a CPU")
    given = parser.parse_args(argv)
    if not given.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; --dry-run checks the path on a CPU", file=sys.stderr)
        return 2
    found = run(TINY, tests=False) if given.dry_run else run(Sizes(), tests=True)
    text = json.dumps(found, indent=1)
    partial = given.json.with_name(f".{given.json.name}-{os.getpid()}")
    partial.write_text(text + "\n")
    os.replace(partial, given.json)
    print(text)
    parts = [part for part in found.values() if isinstance(part, dict)]
    return int(any("failed" in part or "skipped" in part or part.get("exit", 0) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
