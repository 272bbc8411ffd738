"""`bench decode` on the tiny lab: curves, predictions, rivals, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_targets import random_target
from tiny import TinyLab
from tiny_runs import Bench, make_bench

from eagle3_lab.bench.costs import Curves, Cycle
from eagle3_lab.bench.decode import _asked, _contestants, _own
from eagle3_lab.bench.speeds import Contestant, _speed
from eagle3_lab.bench.table import BenchTable, as_text
from eagle3_lab.data.tasks import Task
from eagle3_lab.decode.methods import Head, HeadTree, PromptLookup
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.tree_shapes import Chain
from eagle3_lab.decode.typical import TypicalVerifier
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.runner import Evaluation
from eagle3_lab.pipeline.trained_heads import Heads
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import Decoded, Round

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
        ["evaluate.tasks: 2 prompts, 13 are needed; raise the limit, or lower --prompts"],
    )
    for option in ("--rounds", "--repeats"):
        ran = bench.run("bench decode", option, "0")
        assert (ran.code, ran.err) == (2, f"{option}: must be >= 1, got 0\n")
        ran = bench.run("bench decode", option, "1001")
        assert (ran.code, ran.err) == (2, f"{option}: must be at most 1000, got 1001\n"), "before the target is loaded"
    ran = bench.run("bench decode", "--model", "null", "--checkpoint-path", "x.ckpt")
    fault = "--checkpoint-path: x.ckpt holds a head, and the experiment has no model to load it into"
    assert (ran.code, ran.complaints) == (2, [fault])


def test_a_prompt_that_fills_the_context_is_refused(tiny: TinyLab, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"turns": ["a" * length]}) + "\n" for length in (5, 300)))
    evaluation, target = Evaluation([Task("mine", str(file))], {}), TargetChoice(str(tiny.target)).load()
    assert len(_asked(evaluation, target, None, 1)) == 1, "one that is not asked may be longer"
    with pytest.raises(UserError, match=r"^evaluate\.tasks: a prompt of \d+ tokens leaves no room .* context of 256;"):
        _asked(evaluation, target, None, 2)


def test_every_method_is_judged_as_it_asks_to_be_and_a_lossy_one_is_shown_as_such() -> None:
    target = random_target()
    source, draft = FusedFeature(), Eagle3()
    draft.build(target, source.build(target), torch.arange(90))
    methods = {"lookup": PromptLookup(), "typical": HeadTree(Chain(2), verifier=TypicalVerifier())}
    evaluation = Evaluation([Task("held_out")], methods)
    made = _contestants(evaluation, target, Heads(Head(source, draft)))
    assert [(one.name, one.verifier.lossless) for one in made] == [
        ("vanilla", True),
        ("lookup", True),
        ("typical", False),
    ]
    curves = Curves(5, {1: Cycle(0.0, 2.0, 0.5), 3: Cycle(0.0, 3.0, 0.5)}, {1: 1.5, 3: 2.5})
    two = Decoded((7, 8, 9), (Round(2, 1, 2),), "length", {"prefill": 4.0})
    speeds = [_speed(one, [(two, 10.0)], [3], {3: 1.0}, curves, 0.3) for one in made]
    names = [line.split("  ")[0] for line in as_text(BenchTable("", "", 5, curves, speeds, [])).splitlines()]
    assert names[-3:] == ["vanilla", "lookup", "typical (lossy)"]
    assert speeds[0].predicted == pytest.approx(3 / (4.0 + 2 / 2 * (1.0 + 3.0 + 0.5)))


def test_the_levels_timed_are_those_of_the_experiments_own_head() -> None:
    methods = {
        "lookup": PromptLookup(),
        "theirs": HeadTree(Chain(2), head="experiments/medusa"),
        "ours": HeadTree(Chain(2)),
    }
    evaluation = Evaluation([Task("held_out")], methods)
    other, own = (Eagle.__new__(Eagle) for _ in range(2))
    contestants = [Contestant("vanilla", Vanilla()), Contestant("theirs", other), Contestant("ours", own)]
    assert _own(contestants, evaluation) is own
    assert _own(contestants[:2], evaluation) is None
