"""`python -m eagle3_lab.bench.gpu_check`: everything that needs a GPU, in one command and one JSON.

Tests marked gpu; decoding and training on a random target of Llama-3.1-8B's shape, made on the device; graphs on
against off; what bfloat16 ties and flips. Needs torch, transformers, jaxtyping and pytest: no network, none of the
libraries that read configurations, load data or keep runs. ``--dry-run`` is the same path on a tiny target, on a CPU.

A part that fails is told in the JSON and does not stop the others; one for which the time is too short is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from eagle3_lab.backend.compile import fusing
from eagle3_lab.backend.cuda_graphs import Record
from eagle3_lab.bench.costs import Cycle, Idle, Laps, Meter, answer, curves
from eagle3_lab.bench.gpu_setup import TINY, Bench, Sizes
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Proposer
from eagle3_lab.system.files import write_atomic
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.precast import unrolled
from eagle3_lab.types import Batch, Decoded, Needs

TESTS = Path(__file__).resolve().parents[2] / "tests"
LIMIT_S = 480.0


Part = Callable[[Bench], dict[str, object]]


def decoding(bench: Bench, record: Record | None = None) -> dict[str, object]:
    """Curves, and vanilla and a dynamic tree by the real loop. A random head's tau says nothing; its costs do."""
    s, law = bench.sizes, SamplingLaw()
    target, eagle = bench.wrapped(record), bench.eagle(record)
    with bench.narrow():
        meter = Meter(target, eagle, law, bench.ids, nodes=s.nodes, widths=s.widths, rounds=s.rounds)
        made = curves(meter, s.repeats)
        found: dict[str, object] = {"curves": asdict(made)}
        for name, proposer in (("vanilla", Vanilla()), ("tree", eagle)):
            decoded, clock = _answered(bench, target, proposer)
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
    return found


def graphs(bench: Bench) -> dict[str, object]:
    """The tree with nothing recorded, with the target's forwards, and with the head's rounds too: tokens/s, a round's
    parts, and how many tokens are the plain answer's before the first that is not. In a narrow dtype that may be a
    near-tie: rows of other shapes are rounded otherwise."""
    record = bench.record()
    recorded = bench.wrapped(record)
    kinds = {
        "off": (bench.target, None),
        "target": (recorded, None),
        "target_and_draft": (recorded, record),
    }
    found: dict[str, object] = {"recorded_by": type(record).__name__}
    plain: tuple[int, ...] = ()
    with bench.narrow():
        for name, (target, how) in kinds.items():
            decoded, clock = _answered(bench, target, bench.eagle(how))
            plain = plain or decoded.tokens
            both = zip(plain, decoded.tokens, strict=True)
            found[name] = {
                "tokens": len(plain),
                "alike": next((i for i, (a, b) in enumerate(both) if a != b), len(plain)),
                "rounds": len(decoded.rounds),
                "tokens_per_s": len(plain) / sum(clock.seconds().values()),
                "cycle": asdict(Cycle.of(clock.rounds[1:])),
            }
    return found


def _answered(bench: Bench, target: HFTarget, proposer: Proposer) -> tuple[Decoded, Laps]:
    """An answer and its seconds, after one that warms up and records."""
    clock = Laps(bench.device)
    for _ in range(2):
        decoded = answer(target, proposer, SamplingLaw(), bench.ids, bench.sizes.tokens, clock)
    return decoded, clock


def agreement(bench: Bench) -> dict[str, object]:
    """Logits of graphs against plain forwards, and of one row against a whole tree's: largest differences, exact ties
    of the two likeliest tokens, and arg-maxima that differ (flips), over a random text's tokens as roots."""
    s = bench.sizes
    nodes = max(s.nodes)
    proposer = Idle(nodes, s.vocab)
    graph = bench.wrapped(bench.record())
    kinds = {"one": (bench.target, 1), "many": (bench.target, nodes), "graph": (graph, nodes)}
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


def training(bench: Bench, compiled: bool = False) -> dict[str, object]:
    """Steps of the whole training path but for the trainer: features, unroll, loss, backward, AdamW. The first two are
    not counted, in which torch compiles what ``compiled`` asks for."""
    s = bench.sizes
    ids = torch.randint(s.vocab, (1, s.rows), generator=torch.Generator().manual_seed(2)).to(bench.device)
    position = torch.arange(s.rows, device=bench.device)[None]
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), position, torch.zeros_like(ids))
    unroll, loss = Unroll(s.depth), UnrolledLoss([SoftCE(1.0)])
    parameters = [p for m in (bench.source, bench.draft) for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    needs = Needs(layers=bench.source.layers(s.layers), top=True)
    seconds, losses = [], []
    for _ in range(s.steps + 2):
        began = _now(bench.device)
        narrow = torch.autocast(s.device, dtype=torch.bfloat16, enabled=s.dtype == torch.bfloat16)
        with narrow, fusing(compiled):
            out = bench.target.features(batch, needs)
            assert out.top is not None
            steps = unrolled(unroll, bench.draft, bench.source(out.taps), batch)
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
        "decoding": decoding,
        "graphs": graphs,
        "agreement": agreement,
        "training": training,
        "decoding_captured": lambda b: decoding(b, b.record()),
        "training_compiled": lambda b: training(b, compiled=True),
    }
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
    parser = argparse.ArgumentParser(prog="python -m eagle3_lab.bench.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the findings are written")
    parser.add_argument("--dry-run", action="store_true", help="the same path on a tiny target, on a CPU")
    given = parser.parse_args(argv)
    if not given.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; --dry-run checks the path on a CPU", file=sys.stderr)
        return 2
    found = run(TINY, tests=False) if given.dry_run else run(Sizes(), tests=True)
    text = json.dumps(found, indent=1)
    write_atomic(given.json, (text + "\n").encode())
    print(text)
    parts = [part for part in found.values() if isinstance(part, dict)]
    return int(any("failed" in part or "skipped" in part or part.get("exit", 0) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
