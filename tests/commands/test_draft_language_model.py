"""A draft language model by command lines on the tiny target: trained, measured, answering, exported, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_evaluate import counters
from tiny import TinyLab
from tiny_runs import Bench, Ran
from transformers import AutoModelForCausalLM

EXPERIMENT = """\
# The first two of four layers as a draft language model.
name: sps
target: {{model: {target}}}
data: {{path: {data}, max_length: 96, row_length: 128}}
model:
  features: NoFeature
  draft: {{class_path: FirstLayers, init_args: {{layers: 2}}}}
  unroll: {{class_path: NextToken, init_args: {{reach: 3}}}}
  losses: [SoftCE]
optimizer: {{lr: 3.0e-3}}
trainer: {{max_steps: 6, products: float32, gradient_clip_val: 0.5, val_check_interval: 3, limit_val_batches: 1}}
evaluate:
  tasks: [{{name: held_out, limit: 2}}]
  max_new_tokens: 8
  methods:
    pld: {{class_path: PromptLookup, init_args: {{length: 3, full: false}}}}
    drawn:
      class_path: DraftLM
      init_args: {{length: 3, law: {{class_path: SamplingLaw, init_args: {{temperature: 1.0}}}}}}
    sps: {{class_path: DraftLM, init_args: {{length: 3, adaptive: false}}}}
tracking: {{folder: {folder}}}
"""


def make(tiny: TinyLab, folder: Path) -> Bench:
    runs, yaml = folder / "mlruns", folder / "sps.yaml"
    yaml.write_text(EXPERIMENT.format(target=tiny.target, data=tiny.data, folder=runs))
    return Bench(yaml, runs)


@pytest.fixture(scope="module")
def finished(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Ran]:
    """The experiment run to its end once, and what that said."""
    done = make(tiny, tmp_path_factory.mktemp("sps"))
    return done, done.run("fit", "--json", str(done.yaml.with_name("table.json")))


def test_fit_trains_it_and_measures_it(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    assert (ran.code, ran.complaints) == (0, [])
    table = json.loads(bench.yaml.with_name("table.json").read_text())
    assert [row["name"] for row in table["methods"]] == ["vanilla", "pld", "drawn", "sps"]
    assert len(table["one_pass"]["n_alpha_walked"]) == 7
    state = torch.load(bench.work() / "draft.ckpt", weights_only=True)["state_dict"]
    assert len([name for name in state if name.startswith("draft.lm.")]) == 2 * 9 + 1  # neither embedding nor head


def test_evaluate_measures_what_fit_measured(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, _ = finished
    ran = bench.run("evaluate", "--json", str(tmp_path / "table.json"))
    assert (ran.code, ran.complaints) == (0, [])
    again, first = (json.loads(p.read_text()) for p in (tmp_path / "table.json", bench.yaml.with_name("table.json")))
    assert counters(again) == counters(first)


def test_generate_says_what_vanilla_says(finished: tuple[Bench, Ran]) -> None:
    bench, _ = finished
    said = {name: bench.run("generate", "abc", "--method", name) for name in ("sps", "drawn", "vanilla")}
    assert [ran.code for ran in said.values()] == [0, 0, 0]
    assert len({ran.out for ran in said.values()}) == 1
    assert "[sps: tau " in bench.run("generate", "abc").err  # the last method that needs a head is the default


def test_an_exported_draft_is_a_model_that_any_engine_reads(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, _ = finished
    ran = bench.run("export", str(tmp_path / "draft"))
    assert (ran.code, ran.out) == (0, "")
    table = tmp_path / "table.json"
    named = ("--evaluate.methods.sps.target.model", str(tmp_path / "draft"))
    words = ("--checkpoint-path", str(bench.work() / "draft.ckpt"), "--json", str(table))
    words += ("--tracking.folder", str(tmp_path / "runs"))
    assert bench.run("evaluate", *named, *words).code == 0
    ours = json.loads(bench.yaml.with_name("table.json").read_text())
    assert counters(json.loads(table.read_text()))["methods"] == counters(ours)["methods"]

    target = next(line for line in bench.yaml.read_text().splitlines() if line.startswith("target:"))
    whole, draft = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (target.removeprefix("target: {model: ").rstrip("}"), tmp_path / "draft")
    )
    ids = torch.tensor([[10, 20, 30, 40]])
    plain = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 257}
    assert torch.equal(whole.generate(ids, assistant_model=draft, **plain), whole.generate(ids, **plain))

    again = bench.run("export", str(tmp_path / "draft"))
    (line,) = again.complaints
    assert (again.code, line) == (2, f"{tmp_path / 'draft'}: is there already; remove it, or name another folder")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model.draft.layers", "0"), "draft.layers must be >= 1, got 0"),
        (("--model.draft.layers", "5"), "model: draft.layers must be at most the target's 4, got 5"),
        (("--model.draft_vocab", "64"), "model: draft_vocab must be null for FirstLayers"),
        (("--model.features", "TopFeature"), "model: features must be NoFeature for FirstLayers"),
        (("--model.unroll", "Unroll"), "model: unroll must be NextToken for FirstLayers, got Unroll"),
        (
            ("--evaluate.methods.sps", "{class_path: HeadTree, init_args: {grow: McSim7b63}}"),
            "evaluate.methods.sps: HeadTree reads features, and FirstLayers does not; use DraftLM",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(words: tuple[str, str], told: str, tiny: TinyLab, tmp_path: Path) -> None:
    ran = make(tiny, tmp_path).run("fit", *words)
    (line,) = ran.complaints
    assert ran.code == 2
    assert told in line


def test_a_head_is_no_language_model(bench: Bench) -> None:
    (line,) = bench.run("fit", "--evaluate.methods.chain", "DraftLM").complaints
    assert line.endswith("that this experiment trained, which trained Eagle3; name a model, or use HeadTree")


def test_a_draft_language_model_has_one_layout(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    (line,) = finished[0].run("export", str(tmp_path / "draft"), "--to", "vllm").complaints
    assert line == "export: FirstLayers is a model by itself, in transformers' layout; leave out --to"
