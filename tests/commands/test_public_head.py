"""Public heads from the command line: what a head of ours gives as one, and the known answers on a stand-in."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_evaluate import counters
from tiny import HIDDEN, LAYERS, VOCAB, TinyLab
from tiny_runs import PROGRESS, Bench, Ran

from eagle3_lab import load
from eagle3_lab.__main__ import main
from eagle3_lab.formats import loading
from eagle3_lab.formats.description import describe
from eagle3_lab.formats.writing import write
from eagle3_lab.pipeline import inputs
from eagle3_lab.pipeline.context import open_evaluation
from eagle3_lab.pipeline.find_head import find_head
from eagle3_lab.training import checkpoint

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "evaluate"
KNOWN = sorted(path.stem for path in EXPERIMENTS.glob("known_answer_*.yaml"))


@pytest.fixture
def published(finished: tuple[Bench, Ran], tmp_path: Path) -> Path:
    """The finished experiment's trained head as a public one."""
    experiment = load(str(finished[0].yaml))
    target, model = experiment.target.load(), experiment.model
    checkpoint.restore(finished[0].work() / "draft.ckpt", target, model.features, model.draft)
    write(tmp_path / "head", describe(target, model.features, model.draft), target)
    return tmp_path / "head"


def test_a_trained_head_measures_the_same_as_a_public_one(
    finished: tuple[Bench, Ran], bench: Bench, published: Path, tmp_path: Path
) -> None:
    ran = bench.run("evaluate", "--model.public", str(published), "--json", str(tmp_path / "table.json"))
    assert (ran.code, ran.complaints) == (0, [])
    assert f"checkpoint: {published}" in ran.out
    told = json.loads((tmp_path / "table.json").read_text())
    assert counters(told) == counters(json.loads(finished[0].yaml.with_name("table.json").read_text()))
    ran = bench.run("generate", "ab", "--model.public", str(published), "--max-new-tokens", "6")
    assert ran.code == 0
    assert "tau" in ran.err


@pytest.mark.parametrize("to", ["engines", "speculators"])
def test_a_trained_head_is_exported_by_a_command_line(
    finished: tuple[Bench, Ran], bench: Bench, tiny: TinyLab, tmp_path: Path, to: str
) -> None:
    ran = finished[0].run("export", str(tmp_path / "out"), "--to", to, "--dtype", "bfloat16")
    (line,) = ran.complaints
    assert (ran.code, ran.out, line) == (0, "", f"{tmp_path}/out: EAGLE-3 head for {tiny.target}, format {to}")
    trained = checkpoint.read(finished[0].work() / "draft.ckpt")["state_dict"]
    head = loading.read(str(tmp_path / "out"))
    assert torch.equal(head.tensors["fc.weight"], trained["source.fc.weight"].to(torch.bfloat16))
    header, card = (tmp_path / "out" / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(header)["base_model"] == str(tiny.target)
    rows = [line for line in card.splitlines() if line.startswith(("| chain |", "| static |", "| dynamic |"))]
    table = {row["name"]: row for row in json.loads(finished[0].yaml.with_name("table.json").read_text())["methods"]}
    for row in rows:
        assert f"| {table[row.split()[1]]['tau']['value']:.2f} [" in row
    assert len(rows) == 3
    assert "conversations.jsonl" in card and "vllm" in card and "depth: 3" in card
    for words, message in (
        ((), f"{tmp_path}/out: is there already; remove it, or name another folder"),
        (("--to", "vlm"), "--to: expected "),
    ):
        (line,) = finished[0].run("export", str(tmp_path / "out"), *words).complaints
        assert line.startswith(message)
    ran = bench.run("export", str(tmp_path / "untrained"))
    assert ran.code == 2 and "train one with `fit`" in ran.err
    assert not (tmp_path / "untrained").exists()


def test_a_bench_measures_the_public_head_and_says_so(
    finished: tuple[Bench, Ran], bench: Bench, published: Path
) -> None:
    experiment = load(str(bench.yaml), f"model.public={published}")
    context = open_evaluation(experiment, None, answer=False, untrained=True)
    assert context.head_place is not None and context.module is not None
    assert context.head_place.place == str(published), "and not that it is untrained"
    trained = checkpoint.read(finished[0].work() / "draft.ckpt")["state_dict"]
    torch.testing.assert_close(context.module.source.state_dict()["fc.weight"], trained["source.fc.weight"])


def test_training_goes_on_from_a_public_head_and_is_then_what_is_measured(bench: Bench, published: Path) -> None:
    words = ("--model.public", str(published), "--evaluate.tasks.0.limit", "1")
    ran = bench.run("fit", *words, "--trainer.max_steps", "3")
    assert (ran.code, ran.complaints) == (0, [])
    ran = bench.run("evaluate", *words, "--trainer.max_steps", "3")
    assert (ran.code, ran.complaints) == (0, [])
    assert f"checkpoint: {bench.work() / 'draft.ckpt'}" in ran.out


def test_two_beginnings_a_missing_head_and_other_parts_cost_one_line_each(bench: Bench, published: Path) -> None:
    head = str(published)
    for words, fault in (
        (("--model.public", head, "--model.start", "x.ckpt"), "model.start is x.ckpt and model.public"),
        (("--model.public", f"{head}/none"), "model.public: no file or folder"),
        (
            ("--model.public", head, "--model.features.layers", "[0, 1, 2]"),
            "reads hidden states [1, 2, 3]",
        ),
        (("--model.public", head, "--model.features", "TopFeature"), "the experiment has Eagle3 on TopFeature"),
    ):
        for verb in ("evaluate", "fit"):
            ran = bench.run(verb, *words)
            assert (ran.code, ran.out) == (2, "")
            (line,) = ran.complaints
            assert fault in line


def stand_in(folder: Path) -> Path:
    """A random head of the tiny target's shapes, by the public names alone, as the public repositories hold it."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (2 * HIDDEN, HIDDEN),
        "midlayer.mlp.up_proj.weight": (2 * HIDDEN, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (64, HIDDEN),
    }
    tensors = {name: torch.randn(shape, generator=draw).half() for name, shape in shapes.items()}
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[:64] = True
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": 64,
        "max_position_embeddings": 2048,
        "eagle_aux_hidden_state_layer_ids": [1, LAYERS // 2, LAYERS - 1],  # the official ones need seven layers
    }
    folder.mkdir()
    torch.save(tensors | {"d2t": torch.zeros(64, dtype=torch.long), "t2d": t2d}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_answer_is_measured_as_written_on_a_stand_in(name: str, tiny: TinyLab, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["ab", "c"]}))
    words = (
        f"--target.model {tiny.target} --target.dtype float32 --target.chat_template null "
        f"--model.public {stand_in(tmp_path / 'head')} --data.path {tiny.data} --data.max_length 96 "
        f"--data.row_length 96 --evaluate.tasks [{{name: mine, path: {tmp_path / 'mine.jsonl'}}}] "
        f"--evaluate.max_new_tokens 8 --tracking.folder {tmp_path / 'runs'} --json {tmp_path / 'table.json'}"
    )
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["evaluate", str(EXPERIMENTS / f"{name}.yaml"), *_split(words)])
    assert code == 0, err.getvalue()
    assert [line for line in err.getvalue().splitlines() if not PROGRESS.match(line)] == []
    rows = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())["methods"]}
    assert set(rows) == {"vanilla", "chain", "tree"}
    assert (len(rows["chain"]["n_alpha"]), len(rows["tree"]["n_alpha"])) == (7, 8)
    assert len({row["tokens"] for row in rows.values()}) == 1, "a random head changes no token"


def _split(words: str) -> list[str]:
    """At each ``--``: values hold spaces."""
    pairs = [word.partition(" ") for word in words.split("--") if word]
    return [part for key, _, value in pairs for part in (f"--{key}", value.strip())]


def test_there_is_a_known_answer_for_each_of_two_targets() -> None:
    assert KNOWN == ["known_answer_llama31_8b", "known_answer_vicuna_13b"]
    for name in KNOWN:
        experiment = load(str(EXPERIMENTS / f"{name}.yaml"))
        assert experiment.evaluate is not None
        tree = experiment.evaluate.methods["tree"]
        assert (tree.levels, tree.grow.nodes) == (8, 60)  # pyright: ignore[reportAttributeAccessIssue]
        assert [task.name for task in experiment.evaluate.tasks] == [
            "mt_bench",
            "humaneval",
            "gsm8k",
            "alpaca",
            "cnn_dm",
        ]


# ---- heads by any name


def test_a_head_is_found_by_its_run_its_file_its_folder_or_its_format(
    finished: tuple[Bench, Ran], bench: Bench, published: Path
) -> None:
    work = finished[0].work()
    run_id = json.loads((work / "state.json").read_text())["run_id"]
    experiment = load(str(finished[0].yaml))
    target = inputs.load_target(experiment)
    trained = checkpoint.read(work / "draft.ckpt")["state_dict"]
    for reference in (f"mlflow:{run_id}", str(work / "draft.ckpt"), str(work), str(published)):
        place = find_head(reference, experiment, target)
        source, draft = place.load_parts(target, experiment)
        assert torch.equal(source.state_dict()["fc.weight"], trained["source.fc.weight"]), reference
        assert torch.equal(draft.state_dict()["lm_head.weight"], trained["draft.lm_head.weight"]), reference
    method = f"{{class_path: HeadTree, init_args: {{grow: McSim7b63, head: {published}}}}}"
    words = ("--evaluate.methods", f"{{static: {method}}}", "--evaluate.tasks.0.limit", "2")
    ran = finished[0].run("evaluate", "--checkpoint-path", str(published), *words)
    assert (ran.code, ran.complaints) == (0, [])
    for reference, message in (
        ("mlflow:none", "no run 'none' in this store"),
        (str(work / "other"), f"no file or folder {work / 'other'}"),
    ):
        (line,) = finished[0].run("evaluate", "--checkpoint-path", reference).complaints
        assert message in line
