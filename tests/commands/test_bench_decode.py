"""`bench decode` on the tiny lab: curves, predictions, rivals, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import Bench, make_bench
from tiny import TinyLab

from eagle3_lab.commands.bench_decode import _Contestant, _own
from eagle3_lab.data.tasks import Task
from eagle3_lab.decode.grow import Chain
from eagle3_lab.decode.methods import HeadTree, PromptLookup
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.evaluation import Evaluation

LOOKUP = "lookup: {class_path: PromptLookup, init_args: {max_ngram: 2, length: 3}}"


@pytest.fixture(scope="module")
def bench(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = make_bench(tiny, tmp_path_factory.mktemp("bench"))
    text = made.yaml.read_text()
    draft = f"lm: {{class_path: DraftLM, init_args: {{target: {{model: {tiny.target}}}, length: 2, adaptive: false}}}}"
    first = text.index("    chain:")
    made.yaml.write_text(text[:first] + f"    {LOOKUP}\n    {draft}\n    chain:" + text[first + len("    chain:") :])
    return made


@pytest.mark.slow
def test_curves_predictions_and_rivals_of_every_method(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ran = bench.run("bench decode", "--prompts", "1", "--rounds", "2", "--repeats", "1", "--json", str(file))
    assert ran.code == 0, ran.err
    assert "head: untrained (no checkpoint): costs are true, tau is not" in ran.out
    said = json.loads(file.read_text())
    methods = {row["name"]: row for row in said["methods"]}
    assert list(methods) == ["vanilla", "lookup", "lm", "chain", "static", "dynamic"]
    for row in methods.values():
        assert str(row["nodes"]) in said["curves"]["verify"]
        assert row["off"] == pytest.approx(row["predicted"] / row["tokens_per_s"] - 1)
        assert row["name"] in ran.out
    assert methods["vanilla"]["speedup"] == 1.0
    assert methods["vanilla"]["tau"] == 1.0
    assert methods["lm"]["tau"] > 2  # the target drafts for itself; the last round is cut
    rivals = {row["name"] for row in said["rivals"]}
    own = {"transformers", "transformers prompt lookup", "transformers assisted"}
    assert rivals == own | {f"{name}, as it loads models" for name in own}, "on our layers and on its own"
    assert [row["against"] for row in said["rivals"]] == ["vanilla", "lookup", "lm"] * 2
    for row in said["rivals"]:
        ours = methods[row["against"]]["tokens_per_s"] / row["tokens_per_s"]
        assert row["ours"]["low"] <= row["ours"]["value"] <= row["ours"]["high"]
        assert row["ours"]["value"] == pytest.approx(ours)
    assert len({row["tokens"] for row in said["rivals"]}) == 1


def test_a_tree_that_leaves_no_room_for_a_prompt_is_told_in_one_line(bench: Bench) -> None:
    grow = "{class_path: Chain, init_args: {length: 250}}"
    words = ("--evaluate.methods", f"{{deep: {{class_path: HeadTree, init_args: {{grow: {grow}}}}}}}")
    ran = bench.run("bench decode", "--prompts", "1", "--rounds", "1", "--repeats", "1", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith(
        "evaluate.methods.deep: no calibration answer has a second round that drafts; "
    )


def test_what_cannot_be_measured_is_told_in_one_line(bench: Bench) -> None:
    ran = bench.run("bench decode", "--prompts", "9")
    assert (ran.code, ran.complaints) == (
        2,
        ["evaluate.tasks: 2 prompts, 13 are needed; raise the limit, or --prompts 1"],
    )
    for option in ("--rounds", "--repeats"):
        ran = bench.run("bench decode", option, "0")
        assert (ran.code, ran.err) == (2, f"{option}: must be >= 1, got 0\n")
        ran = bench.run("bench decode", option, "1001")
        assert (ran.code, ran.err) == (2, f"{option}: must be at most 1000, got 1001\n"), "before the target is loaded"


def test_the_levels_timed_are_those_of_the_experiments_own_head() -> None:
    methods = {
        "lookup": PromptLookup(),
        "theirs": HeadTree(Chain(2), head="experiments/medusa"),
        "ours": HeadTree(Chain(2)),
    }
    evaluation = Evaluation([Task("held_out")], methods)
    other, own = (Eagle.__new__(Eagle) for _ in range(2))
    contestants = [_Contestant("vanilla", Vanilla()), _Contestant("theirs", other), _Contestant("ours", own)]
    assert _own(contestants, evaluation) is own
    assert _own(contestants[:2], evaluation) is None
