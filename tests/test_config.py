"""The configuration front: what is read, how it is composed, what is refused and in which words.

The parts here are toys with their own base classes, so that no short name of theirs meets a real one.
"""

from __future__ import annotations

import abc
import copy
import doctest
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal, final

import numpy as np
import pytest
import torch

import eagle3_lab.__main__ as front
import eagle3_lab.config.editing
import eagle3_lab.errors
from eagle3_lab.config import (
    Composed,
    Config,
    ConfigError,
    Document,
    build,
    check,
    compose,
    find_experiment,
    load,
    overlay,
    read,
    to_yaml,
)
from eagle3_lab.config.reading import FREE
from eagle3_lab.errors import UserError, near

# ---------------------------------------------------------------------------------------------------------------------
# toy parts


class ToyFeatures(abc.ABC):
    @abc.abstractmethod
    def drawn(self) -> list[float]: ...


class ToyFused(ToyFeatures):
    """Several layers in one.

    Args:
        hidden: the width.
    """

    def __init__(self, hidden: int, scale: float = 1.0) -> None:
        if hidden < 1:
            raise ValueError(f"hidden must be >= 1, got {hidden}")
        if hidden > 1000:
            raise RuntimeError("a fault of ours")
        self.hidden, self.scale = hidden, scale
        self.weight = torch.randn(hidden)

    def drawn(self) -> list[float]:
        return self.weight.tolist()


class ToyTop(ToyFeatures):
    """The last layer alone."""

    def drawn(self) -> list[float]:
        return []


class ToyTerm(abc.ABC):
    @abc.abstractmethod
    def loss(self) -> float: ...


class ToySoft(ToyTerm):
    def __init__(self, weight: float = 1.0, decay: float = 0.8) -> None:
        self.weight, self.decay = weight, decay

    def loss(self) -> float:
        return self.weight


class ToyGrow(abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...


@dataclass(frozen=True)
class ToyStatic(ToyGrow):
    nodes: int = 1
    depth: int = 1

    def size(self) -> int:
        return self.nodes


@dataclass(frozen=True)
class ToyDynamic(ToyGrow):
    nodes: int = 60
    depth: int = 7

    def size(self) -> int:
        return self.nodes


class ToySpan(ToyGrow):
    def __init__(self, low: int, high: int, steps: Sequence[int] = (), note: str = "") -> None:
        if low >= high:
            raise ValueError(f"low must lie below high, got {low} and {high}")
        for i, step in enumerate(steps):
            if step < 1:
                raise ValueError(f"steps.{i} must be >= 1, got {step}")

    def size(self) -> int:
        return 1


class ToyBudget(ToyGrow):
    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def size(self) -> int:
        return self.nodes


@dataclass(frozen=True)
class ToyUnroll:
    depth: int = 1
    detach: bool = True

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"unroll.depth must be >= 1, got {self.depth}")


class ToyModel:
    def __init__(
        self,
        features: ToyFeatures,
        unroll: ToyUnroll,
        losses: Sequence[ToyTerm] = (),
        table: dict[str, ToyTerm] | None = None,
        grow: ToyGrow = ToyStatic(nodes=5, depth=5),
        optimizer: Callable[[list], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-4),
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.features, self.unroll, self.losses, self.table = features, unroll, losses, table
        self.grow, self.optimizer, self.dtype, self.device = grow, optimizer, dtype, device


@final
@dataclass
class ToyEnds:
    after: int = 1


@dataclass
class ToyTrainer:
    steps: int = 10
    out: Path | None = None
    edge: Literal["dropped", "counted"] = "dropped"
    ends: ToyEnds = field(default_factory=ToyEnds)
    pair: tuple[ToyTerm, int] | None = None
    either: ToyFeatures | dict[str, Any] | None = None


@dataclass
class ToyExperiment:
    """A toy experiment.

    Args:
        model: what is trained.
        seed: of everything random.
    """

    model: ToyModel
    trainer: ToyTrainer
    again: ToyFeatures | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    note: str = "none"
    step_decay: float = 1.0
    seed: int = 0
    config: Config | None = None


CALLS: list[tuple[ToyExperiment, dict[str, Any]]] = []


def toy_verb(
    experiment: ToyExperiment,
    *,
    json: Path | None = None,
    dry_run: bool = False,
    prompt: str = "",
    count: int = 1,
    how: Literal["fast", "slow"] = "fast",
) -> None:
    """Do nothing, and remember with what.

    Args:
        json: where the result goes.
    """
    if prompt == "fail":
        raise UserError("no checkpoint in runs/1")
    if prompt == "interrupt":
        raise KeyboardInterrupt
    if prompt == "terminate":  # as `timeout` does: the process, and at once its group
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    CALLS.append((experiment, {"json": json, "dry_run": dry_run, "prompt": prompt, "count": count, "how": how}))


toy_verb.positional = "prompt"  # type: ignore[attr-defined]


CASE = """\
let: {hidden: 3, decay: 0.8}
trainer: {steps: 3}
again: ToyTop
model:
  features: common/features.yaml
  unroll: {depth: 7}
  losses:
  - {class_path: ToySoft, init_args: {weight: 0.5, decay: "${let.decay}"}}
  - ToySoft
  dtype: bfloat16
step_decay: ${let.decay}
seed: 3
"""
FEATURES = """\
class_path: ToyFused
init_args:
  hidden: ${let.hidden}
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with experiments/case.yaml as the working folder, and `toy` as a verb."""
    (tmp_path / "experiments/common").mkdir(parents=True)
    (tmp_path / "experiments/case.yaml").write_text(CASE)
    (tmp_path / "experiments/common/features.yaml").write_text(FEATURES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(front.VERBS, "toy", (__name__, "toy_verb", "a toy"))
    CALLS.clear()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run a command line in this process; returns the status, stdout and stderr."""
    status = front.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def edit(old: str, new: str) -> None:
    path = Path("experiments/case.yaml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def checked(tree: dict[str, Any]) -> Config:
    """Check a tree that came from no file."""
    return check(Composed(path=Path("x.yaml"), tree=tree, where={}, raw_yaml="", masked=tree), ToyExperiment)


MODEL = {"features": "ToyTop", "unroll": {}}


# ---------------------------------------------------------------------------------------------------------------------
# reading and composing


def test_an_experiment_is_read_composed_checked_and_built(lab: Path) -> None:
    experiment = load("experiments/case.yaml", into=ToyExperiment)
    assert isinstance(experiment.model.features, ToyFused)
    assert experiment.model.features.hidden == 3
    assert experiment.model.unroll == ToyUnroll(depth=7)
    assert [term.loss() for term in experiment.model.losses] == [0.5, 1.0]
    assert experiment.model.dtype is torch.bfloat16
    assert isinstance(experiment.again, ToyTop)
    assert experiment.step_decay == 0.8
    assert experiment.config is not None
    assert experiment.config.plain["model"]["init_args"]["features"]["class_path"] == f"{__name__}.ToyFused"


def test_where_knows_the_line_of_every_key(lab: Path) -> None:
    where = compose("experiments/case.yaml", [("seed", "4")]).where
    assert where["model.unroll.depth"] == "experiments/case.yaml:6"
    assert where["model.features"] == "experiments/case.yaml:5"
    assert where["model.features.hidden"] == "experiments/common/features.yaml:3"
    assert where["model.losses.1"] == "experiments/case.yaml:9"
    assert where["seed"] == "command line"


def test_overrides_reach_interpolations_in_other_files(lab: Path) -> None:
    tree = compose("experiments/case.yaml", [("let.hidden", "9")]).tree
    assert tree["model"]["features"]["init_args"]["hidden"] == 9
    assert "let" not in tree


def test_numbers_read_as_omegaconf_reads_them(lab: Path) -> None:
    edit("seed: 3", "seed: 3\nnote: 2020-01-01")
    tree = compose("experiments/case.yaml", [("step_decay", "1e-4"), ("tags", "{a: 012, b: 'yes'}")]).tree
    assert (tree["step_decay"], tree["note"], tree["tags"]) == (1e-4, "2020-01-01", {"a": 10, "b": "yes"})


def test_references_are_found_beside_the_file_then_in_the_parents(lab: Path) -> None:
    deep = lab / "experiments/vicuna/7b"
    (deep / "common").mkdir(parents=True)
    (deep / "case.yaml").write_text(CASE.replace("{steps: 3}", "common/trainer.yaml"))
    (deep / "common/trainer.yaml").write_text("out: null\nsteps: 5\n")
    tree = compose("experiments/vicuna/7b/case.yaml").tree
    assert tree["trainer"] == {"out": None, "steps": 5}  # beside it
    assert tree["model"]["features"]["class_path"] == "ToyFused"  # in experiments/, two folders up
    (lab / "common").mkdir()
    (lab / "common/outside.yaml").write_text("steps: 6\n")
    (deep / "case.yaml").write_text(CASE.replace("{steps: 3}", "common/outside.yaml"))
    with pytest.raises(ConfigError, match=r"no file experiments/vicuna/7b/common/outside\.yaml"):
        compose("experiments/vicuna/7b/case.yaml")  # above experiments/ nothing is looked for


def test_an_override_may_name_a_file(lab: Path) -> None:
    (lab / "experiments/common/long.yaml").write_text("steps: 1000\n")
    (lab / "mine.yaml").write_text("steps: 7\n")
    assert compose("experiments/case.yaml", [("trainer", "common/long.yaml")]).tree["trainer"] == {"steps": 1000}
    assert compose("experiments/case.yaml", [("trainer", "mine.yaml")]).tree["trainer"] == {"steps": 7}


def test_a_shipped_experiment_is_found_by_its_name(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = lab / "site-packages/eagle3_lab"
    (package / "experiments/common").mkdir(parents=True)
    (package / "experiments/shipped.yaml").write_text(CASE)
    (package / "experiments/common/features.yaml").write_text(FEATURES)
    monkeypatch.setattr("eagle3_lab.config.reading.PACKAGE", package)
    for name in ("shipped.yaml", "experiments/shipped.yaml"):
        assert find_experiment(Path(name)) == package / "experiments/shipped.yaml"
    assert compose("experiments/shipped.yaml").tree["seed"] == 3
    with pytest.raises(ConfigError, match="^no file shiped.yaml; did you mean 'experiments/shipped.yaml'"):
        find_experiment(Path("shiped.yaml"))
    with pytest.raises(ConfigError, match="there are: .*experiments/case.yaml, experiments/shipped.yaml"):
        find_experiment(Path("experiments/zzzzzz.yaml"))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("{ToyFused: {hidden: 4}}", "{class_path: ToyFused, init_args: {hidden: 4}}"),
        ('{ToyFused: {hidden: "${let.hidden}"}}', '{class_path: ToyFused, init_args: {hidden: "${let.hidden}"}}'),
        ("{ToyFused: common/options.yaml}", "{class_path: ToyFused, init_args: common/options.yaml}"),
        (f"{{{__name__}.ToyFused: {{hidden: 4}}}}", f"{{class_path: {__name__}.ToyFused, init_args: {{hidden: 4}}}}"),
        ("{ToyTop: }", "ToyTop"),
        ("{ToyTop: {}}", "ToyTop"),
    ],
)
def test_a_part_in_short_form_is_the_one_in_long_form(lab: Path, short: str, long: str) -> None:
    (lab / "experiments/common/options.yaml").write_text("hidden: 4\n")
    configs = []
    for form in (short, long):
        edit("again: ToyTop", f"again: {form}")
        configs.append(check(compose("experiments/case.yaml"), ToyExperiment))
        overridden = compose("experiments/case.yaml", [("again", form)])
        assert check(overridden, ToyExperiment).plain == configs[-1].plain
        edit(f"again: {form}", "again: ToyTop")
    assert (configs[0].plain, configs[0].yaml) == (configs[1].plain, configs[1].yaml)
    short_where, long_where = (config.composed.where for config in configs)
    assert short_where.items() - {("again.class_path", "experiments/case.yaml:3")} <= long_where.items()


def test_the_short_form_stands_wherever_a_part_does(lab: Path) -> None:
    edit(
        "  dtype",
        "  table: {One: {ToySoft: {weight: 2.0}}, two: ToySoft}\n  grow:\n    ToyDynamic: {nodes: 3}\n  dtype",
    )
    edit('  - {class_path: ToySoft, init_args: {weight: 0.5, decay: "${let.decay}"}}', "  - ToySoft: {weight: 0.5}")
    (lab / "experiments/common/features.yaml").write_text("ToyFused:\n  hidden: 3\n")
    words = ("model.losses.0.weight=4.0", "model.grow.depth=2", "model.features.hidden=5", "model.table.One.weight=6.0")
    model = load("experiments/case.yaml", *words, into=ToyExperiment).model
    assert [term.loss() for term in model.losses] == [4.0, 1.0]
    assert model.grow == ToyDynamic(3, 2)
    assert isinstance(model.features, ToyFused) and model.features.hidden == 5
    assert model.table is not None and model.table["One"].loss() == 6.0
    patch = Document({"model": {"grow": {"nodes": 8}}})
    assert compose("experiments/case.yaml", patches=[patch]).tree["model"]["grow"]["init_args"] == {"nodes": 8}
    assert compose("experiments/case.yaml").where["model.features.hidden"] == "experiments/common/features.yaml:2"


def test_names_that_the_user_chooses_are_no_classes(lab: Path) -> None:
    for key in FREE:
        document = read(written(lab / "free.yaml", f"{key}: {{Chain: {{length: 3}}}}"))
        assert document.tree == {key: {"Chain": {"length": 3}}}
        assert document.where[f"{key}.Chain.length"] == "free.yaml:1"


# ---------------------------------------------------------------------------------------------------------------------
# overlays and overrides


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        pytest.param({"p": {"a": 1, "b": 2}}, {"p": {"b": 3}}, {"p": {"a": 1, "b": 3}}, id="mappings merge"),
        pytest.param({"p": [1, 2]}, {"p": [3]}, {"p": [3]}, id="a list is replaced whole"),
        pytest.param(
            {"p": {"class_path": "A", "init_args": {"x": 1}}},
            {"p": {"class_path": "B", "init_args": {"y": 2}}},
            {"p": {"class_path": "B", "init_args": {"y": 2}}},
            id="another class drops the arguments",
        ),
        pytest.param(
            {"p": {"class_path": "m.A", "init_args": {"x": 1, "y": 1}}},
            {"p": {"class_path": "A", "init_args": {"y": 2}}},
            {"p": {"class_path": "A", "init_args": {"x": 1, "y": 2}}},
            id="the same class by another path keeps them",
        ),
        pytest.param(
            {"p": {"class_path": "A", "init_args": {"x": 1}}}, {"p": "A"}, {"p": "A"}, id="a bare name is a whole part"
        ),
        pytest.param(
            {"p": {"class_path": "A", "init_args": {"x": 1}}},
            {"p": {"y": 2}},
            {"p": {"class_path": "A", "init_args": {"x": 1, "y": 2}}},
            id="a mapping steps through init_args",
        ),
        pytest.param(
            {"p": "A"}, {"p": {"y": 2}}, {"p": {"class_path": "A", "init_args": {"y": 2}}}, id="also of a bare name"
        ),
        pytest.param({"p": {"x": 1}}, {"p": {"init_args": {"y": 2}}}, {"p": {"x": 1, "y": 2}}, id="short form stays"),
        pytest.param({"p": {"x": 1}}, {"p": {"class_path": "B"}}, {"p": {"class_path": "B"}}, id="short form replaced"),
        pytest.param({"p": {"x": 1}}, {"p": None}, {"p": None}, id="null replaces"),
    ],
)
def test_overlay(base: dict[str, Any], patch: dict[str, Any], result: dict[str, Any]) -> None:
    before = copy.deepcopy((base, patch))
    assert overlay(Document(base), Document(patch)).tree == result
    assert (base, patch) == before


def test_an_overlay_brings_its_own_lines_and_takes_the_old_ones_away(lab: Path) -> None:
    Path("ablation.yaml").write_text("cells:\n  one:\n    model:\n      losses:\n      - {class_path: ToySof}\n")
    cell = read(Path("ablation.yaml")).at("cells.one")
    composed = compose("experiments/case.yaml", patches=[cell])
    assert composed.where["model.losses.0"] == "ablation.yaml:5"
    assert "model.losses.1" not in composed.where
    with pytest.raises(ConfigError, match=r"^ablation\.yaml:5: model\.losses\.0: 'ToySof' is no ToyTerm; did you mean"):
        check(composed, ToyExperiment)
    with pytest.raises(ConfigError, match=r"^ablation\.yaml:1: cells\.two: expected a mapping, got null"):
        read(Path("ablation.yaml")).at("cells.two")


def test_overrides_come_after_overlays(lab: Path) -> None:
    patch = Document({"model": {"unroll": {"depth": 2}}, "seed": 8})
    tree = compose("experiments/case.yaml", [("seed", "9")], patches=[patch]).tree
    assert (tree["model"]["unroll"]["depth"], tree["seed"]) == (2, 9)


@pytest.mark.parametrize(
    ("key", "text", "read_back"),
    [
        ("model.unroll.depth", "2", lambda m: m["unroll"] == {"depth": 2}),
        ("model.unroll.init_args.depth", "2", lambda m: m["unroll"] == {"depth": 2}),
        ("model.losses.0.weight", "2", lambda m: m["losses"][0]["init_args"] == {"weight": 2, "decay": 0.8}),
        (
            "model.losses.1.weight",
            "2",
            lambda m: m["losses"][1] == {"class_path": "ToySoft", "init_args": {"weight": 2}},
        ),
        ("model.losses", "[ToySoft]", lambda m: m["losses"] == ["ToySoft"]),
        ("model.features.hidden", "2", lambda m: m["features"]["init_args"] == {"hidden": 2}),
        ("model.features.init_args.hidden", "2", lambda m: m["features"]["init_args"] == {"hidden": 2}),
        ("model.features", "ToyTop", lambda m: m["features"] == "ToyTop"),
        ("model.features.class_path", "ToyTop", lambda m: m["features"] == {"class_path": "ToyTop"}),
        ("model.features.class_path", "a.ToyFused", lambda m: m["features"]["init_args"] == {"hidden": 3}),
        ("model.grow.nodes", "3", lambda m: m["grow"] == {"nodes": 3}),
        ("model.table", "{a: ToySoft}", lambda m: m["table"] == {"a": "ToySoft"}),
        ("model.device", "null", lambda m: m["device"] is None),
        ("model.device", "a: b", lambda m: m["device"] == "a: b"),
    ],
)
def test_override(lab: Path, key: str, text: str, read_back: Callable[[dict[str, Any]], bool]) -> None:
    assert read_back(compose("experiments/case.yaml", [(key, text)]).tree["model"])


# ---------------------------------------------------------------------------------------------------------------------
# checking


@pytest.mark.parametrize(
    ("grow", "expected"),
    [
        pytest.param("ToyDynamic", ToyDynamic(60, 7), id="another class has its own defaults"),
        pytest.param(
            {"class_path": "ToyDynamic", "init_args": {"depth": 3}}, ToyDynamic(60, 3), id="and its arguments"
        ),
        pytest.param({"class_path": "ToyDynamic", "init_args": None}, ToyDynamic(60, 7), id="init_args: null is none"),
        pytest.param("ToyStatic", ToyStatic(5, 5), id="the same class keeps the slot's"),
        pytest.param({"depth": 3}, ToyStatic(5, 3), id="the default's class is implied"),
        pytest.param(None, ToyStatic(5, 5), id="nothing written"),
    ],
)
def test_the_default_part_of_a_slot_does_not_leak_into_another_class(
    lab: Path, grow: str | dict | None, expected: ToyGrow
) -> None:
    if grow is not None:
        edit("  dtype", "".join(f"  {line}\n" for line in to_yaml({"grow": grow}).splitlines()) + "  dtype")
    assert load("experiments/case.yaml", into=ToyExperiment).model.grow == expected


def test_a_required_argument_is_not_satisfied_by_another_class_default() -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml: model\.grow\.nodes: missing$"):
        checked({"model": {**MODEL, "grow": "ToyBudget"}, "trainer": {}})


def test_the_optimizer_default_does_not_leak_either() -> None:
    config = checked({"model": {**MODEL, "optimizer": "SGD"}, "trainer": {}})
    optimizer = config.plain["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD"
    assert (optimizer["init_args"]["lr"], optimizer["init_args"]["weight_decay"]) == (1e-3, 0)
    made = build(config).model.optimizer([torch.zeros(1, requires_grad=True)])
    assert isinstance(made, torch.optim.SGD)


@pytest.mark.parametrize("tree", [{"modle": {}}, {"model": {**MODEL, "unrol": {}}}, {"trainer": {"stepz": {}}}])
def test_an_unknown_key_with_an_empty_value_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unknown key; did you mean"):
        checked({"model": MODEL, "trainer": {}} | tree)


@pytest.mark.parametrize("key", ["seed", "model", "trainer", "step_decay"])
def test_null_passes_only_where_the_type_has_it(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^x.yaml: {key}: expected .*, got null$"):
        checked({"model": MODEL, "trainer": {}} | {key: None})
    assert checked({"model": MODEL, "trainer": {}, "again": None}).parsed.again is None


def test_dtype_and_device_are_read_and_written() -> None:
    config = checked({"model": {**MODEL, "dtype": "torch.float16", "device": "cpu"}, "trainer": {}})
    model = build(config).model
    assert (model.dtype, model.device) == (torch.float16, torch.device("cpu"))
    assert (config.plain["model"]["init_args"]["dtype"], config.plain["model"]["init_args"]["device"]) == (
        "torch.float16",
        "cpu",
    )


def test_a_class_of_an_untyped_parameter_cannot_be_configured() -> None:
    class Untyped:
        def __init__(self, width=3) -> None:  # noqa: ANN001
            self.width = width

    with pytest.raises(TypeError, match="Untyped cannot be configured"):
        check(Composed(Path("x.yaml"), {}, {}, "", {}), Untyped)


def test_two_classes_of_one_name_must_be_told_apart() -> None:
    twin = type("ToySoft", (ToyTerm,), {"__module__": "toy_twin", "loss": lambda self: 0.0})
    with pytest.raises(ConfigError, match=r"'ToySoft' is the name of 2 classes; write one of .*toy_twin\.ToySoft"):
        checked({"model": {**MODEL, "losses": ["ToySoft"]}, "trainer": {}})
    del twin
    gc.collect()  # a class is a cycle: the twin would be met by the tests that follow


# ---------------------------------------------------------------------------------------------------------------------
# one-line errors

# fmt: off
ERRORS = [
    ("trainer: {", "trianer: {", [],
     "experiments/case.yaml:2: trianer: unknown key; did you mean 'trainer'?"),
    ("{depth: 7}", "{dept: 7}", [],
     "experiments/case.yaml:6: model.unroll.dept: unknown key; did you mean 'depth'?"),
    ('decay: "', 'dekay: "', [],
     "experiments/case.yaml:8: model.losses.0.dekay: unknown key; did you mean 'decay'?"),
    ("depth: 7", "depth: seven", [],
     "experiments/case.yaml:6: model.unroll.depth: expected int, got 'seven'"),
    ("depth: 7", "depth: 7.0", [],
     "experiments/case.yaml:6: model.unroll.depth: expected int, got 7.0"),
    ("depth: 7", "depth: null", [],
     "experiments/case.yaml:6: model.unroll.depth: expected int, got null"),
    ("- ToySoft", "- ToySfot", [],
     "experiments/case.yaml:9: model.losses.1: 'ToySfot' is no ToyTerm; did you mean 'ToySoft'?"),
    ("again: ToyTop", "again: ToyTopp", [],
     "experiments/case.yaml:3: again: 'ToyTopp' is no ToyFeatures; did you mean 'ToyTop'?"),
    ("again: ToyTop", "again: EagleLayer", [],
     "experiments/case.yaml:3: again: 'EagleLayer' is no ToyFeatures; legal: ToyFused, ToyTop"),
    ("again: ToyTop", "again: os.getcwd", [],
     ("experiments/case.yaml:3: again: 'os.getcwd' is not imported; name a class of eagle3_lab, test_config or of a "
      "module of your own")),
    ("again: ToyTop", "again: os.path.Nope", [],
     ("experiments/case.yaml:3: again: 'os.path.Nope' is not imported; name a class of eagle3_lab, test_config or of a "
      "module of your own")),
    ("again: ToyTop", "again: nope.Nope", [],
     "experiments/case.yaml:3: again: 'nope.Nope' cannot be imported: no module nope"),
    ("again: ToyTop", "again: pathlib.Path", [],
     ("experiments/case.yaml:3: again: 'pathlib.Path' is not imported; name a class of eagle3_lab, test_config or of a "
      "module of your own")),
    ("again: ToyTop", "again: ToyFused", [],
     "experiments/case.yaml:3: again.hidden: missing"),
    ("again: ToyTop", "again: {hidden: 3}", [],
     ("experiments/case.yaml:3: again: names no class; write {CLASS: {OPTION: VALUE}} with one of ToyFused, ToyTop")),
    ("again: ToyTop", "again: {ToyFusd: {hidden: 3}}", [],
     "experiments/case.yaml:3: again: 'ToyFusd' is no ToyFeatures; did you mean 'ToyFused'?"),
    ("again: ToyTop", "again: {toyFused: {hidden: 3}}", [],
     ("experiments/case.yaml:3: again: names no class; write {CLASS: {OPTION: VALUE}} with one of ToyFused, ToyTop")),
    ("again: ToyTop", "again: {ToyFused: {hidden: 3}, ToyTop: {}}", [],
     ("experiments/case.yaml:3: again: ToyTop: unexpected beside ToyFused; write one class, with its options below its "
      "name")),
    ("again: ToyTop", "again:\n  ToyFused:\n  hidden: 3", [],
     ("experiments/case.yaml:3: again: hidden: unexpected beside ToyFused; write one class, with its options below its "
      "name")),
    ("again: ToyTop", "again: {ToyFused: 3}", [],
     ("experiments/case.yaml:3: again: names no class; write {CLASS: {OPTION: VALUE}} with one of ToyFused, ToyTop")),
    ("again: ToyTop", "again:\n  ToyFusd:\n    hidden: 3", [],
     "experiments/case.yaml:4: again: 'ToyFusd' is no ToyFeatures; did you mean 'ToyFused'?"),
    ("again: ToyTop", "again:\n  ToyFused:\n    hiden: 3", [],
     "experiments/case.yaml:5: again.hiden: unknown key; did you mean 'hidden'?"),
    ("again: ToyTop", "again:\n  ToyFused:\n    hidden: 0", [],
     "experiments/case.yaml:5: again: hidden must be >= 1, got 0"),
    ("", "", ["--model.losses", "[{ToySoft: {wieght: 1}}]"],
     "command line: model.losses.0.wieght: unknown key; did you mean 'weight'?"),
    ("again: ToyTop", "again: {class_path: ToyFused, hidden: 3}", [],
     "experiments/case.yaml:3: again.hidden: unknown key beside class_path; arguments stand below init_args"),
    ("again: ToyTop", "again: {class_path: ToyFused, init_args: 3}", [],
     "experiments/case.yaml:3: again: expected a mapping of options, got 3"),
    ("trainer: {steps: 3}\n", "", [],
     "experiments/case.yaml: trainer: missing"),
    ("steps: 3", "edge: droped", [],
     ("experiments/case.yaml:2: trainer.edge: expected one of 'dropped', 'counted', got 'droped'; did you "
      "mean 'dropped'?")),
    ("bfloat16", "bfloat61", [],
     "experiments/case.yaml:10: model.dtype: expected dtype, got 'bfloat61'; did you mean 'bfloat16'?"),
    ("common/features", "common/featurs", [],
     ("experiments/case.yaml:5: model.features: no file experiments/common/featurs.yaml; did you mean "
      "'features.yaml'?")),
    ("common/features", "comon/features", [],
     "experiments/case.yaml:5: model.features: no file experiments/comon/features.yaml"),
    ("common/features", "common/${let.x}", [],
     ("experiments/case.yaml:5: model.features: a file reference holds no interpolation, got "
      "'common/${let.x}.yaml'")),
    ("${let.decay}\nseed", "${let.dekay}\nseed", [],
     "experiments/case.yaml:11: step_decay: Interpolation key 'let.dekay' not found; did you mean 'let.decay'?"),
    ("${let.decay}\nseed", "${oc.env:TOY_UNSET}\nseed", [],
     "experiments/case.yaml:11: step_decay: Environment variable 'TOY_UNSET' not found"),
    ("${let.decay}\nseed", "${let.decay\nseed", [],
     "experiments/case.yaml:11: step_decay: no viable alternative at input '${let.decay'"),
    ("${let.decay}\nseed", "???\nseed", [],
     "experiments/case.yaml:11: step_decay: is ??? and must be given"),
    ("seed: 3", "seed: 3\nseed: 4", [],
     "experiments/case.yaml:13: found duplicate key seed"),
    ("  dtype", "\tdtype", [],
     "experiments/case.yaml:10: found character '\\t' that cannot start any token"),
    ("{depth: 7}", "{depth: 7", [],
     "experiments/case.yaml:7: expected ',' or '}', but got ':'"),
    ("seed: 3", "seed: 3\n1: 4", [],
     "experiments/case.yaml:13: key '1' is no text; put it in quotes"),
    ("seed: 3", "seed: 3\nnull: 4", [],
     "experiments/case.yaml:13: key 'null' is no text; put it in quotes"),
    ("seed: 3", "seed: 3\n---\nseed: 4", [],
     "experiments/case.yaml:13: expected a single document in the stream, but found another document"),
    ("seed: 3", "seed: 3\nnote: &a [*a]", [],
     "experiments/case.yaml: is nested too deeply, or an alias (*name) stands within itself"),
    ("seed: 3", "seed: 3\nnote: " + "[" * 3000 + "]" * 3000, [],
     "experiments/case.yaml: is nested too deeply, or an alias (*name) stands within itself"),
    ("step_decay: ${let.decay}", "step_decay: .nan", [],
     "experiments/case.yaml:11: step_decay: expected a finite number, got nan"),
    ("", "", ["--let.decay", "1e400"],
     "--let.decay 1e400: model.losses.0.decay: expected a finite number, got inf"),
    ("seed: 3", "seed: " + "9" * 5000, [],
     "experiments/case.yaml: Exceeds the limit (4300 digits) for integer string conversion"),
    ("", "", ["--seed", "9" * 5000],
     "--seed: Exceeds the limit (4300 digits) for integer string conversion"),
    ("", "", ["--model.optimizer", "..x"],
     "command line: model.optimizer: '..x' is no path of a class; write module.Class"),
    ("", "", ["--note", "a\udcff"],
     "b'a\\xff': is no UTF-8 text"),
    ("seed: 3", "seed: 3\nmodel.unroll: {}", [],
     ("experiments/case.yaml:13: model.unroll: unknown key; legal: again, count, dry_run, how, json, "
      "model, note, prompt, seed, step_decay, tags, trainer")),
    ("let: {hidden: 3, decay: 0.8}", "let: 3", [],
     "experiments/case.yaml:1: let: expected a mapping of shared values"),
    ("depth: 7", "depth: 0", [],
     "experiments/case.yaml:6: model.unroll: unroll.depth must be >= 1, got 0"),
    ("", "", ["--let.hidden", "0"],
     "--let.hidden 0: model.features: hidden must be >= 1, got 0"),
    ("let: {hidden: 3,", "let: {least: 3, hidden: '${let.least}',", ["--let.least", "0"],
     "--let.least 0: model.features: hidden must be >= 1, got 0"),
    ("hidden: 3", "hidden: 0", ["--let.decay", "0.5"],
     "experiments/common/features.yaml:3: model.features: hidden must be >= 1, got 0"),
    ("", "", ["--again", "{class_path: ToyFused, init_args: {hidden: '${let.hidden}'}}", "--let.hidden", "0"],
     "--let.hidden 0: model.features: hidden must be >= 1, got 0"),
    ("  dtype", "  grow: {class_path: ToySpan, init_args: {low: 1, high: 2}}\n  dtype", ["--model.grow.high", "0"],
     "--model.grow.high 0: model.grow: low must lie below high, got 1 and 0"),
    ("  dtype", "  grow: {class_path: ToySpan, init_args: {low: 2, high: 1}}\n  dtype", ["--model.grow.note", "x"],
     "experiments/case.yaml:10: model.grow: low must lie below high, got 2 and 1"),
    ("  dtype", "  grow: {class_path: ToySpan, init_args: {low: 1, high: 2}}\n  dtype", ["--model.grow.steps", "[0]"],
     "command line: model.grow: steps.0 must be >= 1, got 0"),
    ("", "", ["--model.unrol.depth", "3"],
     "command line: model.unrol: unknown key; did you mean 'unroll'?"),
    ("", "", ["--model.unroll.depth", "x"],
     "command line: model.unroll.depth: expected int, got 'x'"),
    ("", "", ["--model.losses.7.weight", "3"],
     "--model.losses.7.weight: model.losses is a list of 2, '7' is no index of it"),
    ("", "", ["--model.losses.first", "3"],
     "--model.losses.first: model.losses is a list of 2, 'first' is no index of it"),
    ("", "", ["--seed.x", "3"],
     "--seed.x: seed is 3 and holds no key 'x'"),
    ("", "", ["--model..x", "3"],
     "--model..x: expected names with single dots between them"),
    ("", "", ["--let.hiden", "3"],
     "--let.hiden: nothing is called so below let; did you mean 'hidden'?"),
    ("", "", ["--model.optimizer", "SGDD"],
     "command line: model.optimizer: 'SGDD' is no Optimizer; did you mean 'SGD'?"),
    ("", "", ["--model.optimizer", "{class_path: SGD, init_args: {lrr: 1}}"],
     "command line: model.optimizer.lrr: unknown key; did you mean 'lr'?"),
    ("", "", ["--model.losses", "ToySoft"],
     "command line: model.losses: expected a list of ToyTerm, got 'ToySoft'; a list of one is [ToySoft]"),
    ("", "", ["--model.table", "{a: {class_path: ToySoft, init_args: {wieght: 1}}}"],
     "command line: model.table.a.wieght: unknown key; did you mean 'weight'?"),
    ("", "", ["--trainer", "common/trainr.yaml"],
     "--trainer: no file experiments/common/trainr.yaml; there are: features.yaml"),
    ("", "", ["--note", "${x"],
     "--note: no viable alternative at input '${x'"),
    ("", "", ["--trainer.pair", "[ToySoft, x]"],
     "command line: trainer.pair.1: expected int, got 'x'"),
    ("", "", ["--trainer.pair", "[ToySoft]"],
     "command line: trainer.pair: expected a list of ToyTerm, int or null, got ['ToySoft']"),
    ("", "", ["--trainer.ends.aftr", "1"],
     "command line: trainer.ends.aftr: unknown key; did you mean 'after'?"),
    ("", "", ["--seed"],
     "--seed: needs a value"),
    ("", "", ["--dryrun"],
     "--dryrun: no such option; did you mean 'dry_run'?"),
    ("", "", ["--json"],
     "--json: needs a value, Path or null"),
    ("", "", ["--count", "x"],
     "--count: expected int, got 'x'"),
    ("", "", ["--how", "fats"],
     "--how: expected one of 'fast', 'slow', got 'fats'; did you mean 'fast'?"),
    ("", "", ["hello", "you"],
     "'you': unexpected; an override is written --key value"),
    ("", "", ["fail"],
     "no checkpoint in runs/1"),
]
# fmt: on


@pytest.mark.parametrize(("old", "new", "words", "line"), ERRORS, ids=[line[-60:] for *_, line in ERRORS])
def test_a_mistake_costs_one_line(
    lab: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: list[str], line: str
) -> None:
    edit(old, new)
    assert run(capsys, "toy", "experiments/case.yaml", *words) == (2, "", line + "\n")


def test_a_file_that_includes_itself_is_refused(lab: Path) -> None:
    (lab / "experiments/common/features.yaml").write_text("class_path: ToyTop\ninit_args: other.yaml\n")
    (lab / "experiments/common/other.yaml").write_text("x: features.yaml\n")
    with pytest.raises(ConfigError, match=r"^experiments/common/features\.yaml: includes itself \(case\.yaml -> feat"):
        compose("experiments/case.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- 1\n", "expected a mapping at the top, got a list"),
        ("hello\n", "expected a mapping at the top, got 'hello'"),
        ("a: \x00\n", "unacceptable character"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(lab: Path, text: str, line: str) -> None:
    Path("experiments/case.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^experiments/case\.yaml: {line}"):
        compose("experiments/case.yaml")


def test_a_file_that_is_not_utf8_is_refused(lab: Path) -> None:
    Path("experiments/case.yaml").write_bytes(b"note: \xff\n")
    with pytest.raises(ConfigError, match=r"^experiments/case\.yaml: is no UTF-8 text \(byte 6\); save"):
        compose("experiments/case.yaml")


def test_an_empty_file_is_refused_as_such(lab: Path) -> None:
    Path("experiments/case.yaml").write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match=r"^experiments/case\.yaml: is empty; an experiment names at least"):
        compose("experiments/case.yaml")


def test_a_name_that_no_file_system_takes_is_no_file(lab: Path) -> None:
    long = "x" * 300
    for path in (f"{long}/case.yaml", "a/" * 3000 + "case.yaml", f"{long}.yaml"):
        with pytest.raises(ConfigError, match=r"^no file |: no file has a name of 305 bytes$"):
            compose(path)
    for name in (f"{long}.yaml", f"{long}/features.yaml"):
        with pytest.raises(ConfigError, match=r"^--model\.features: no file .*\.yaml"):
            compose("experiments/case.yaml", [("model.features", name)])


def test_aliases_that_multiply_are_refused_at_once(lab: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    Path("experiments/case.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"^experiments/case\.yaml:1: more than 100000 values; aliases"):
        compose("experiments/case.yaml")


@pytest.mark.parametrize(
    ("source", "told"),
    [("1 / 0\n", r"mine\.py:1: ZeroDivisionError: division by zero"), ("def f(:\n", r"mine\.py:1: SyntaxError: ")],
)
def test_a_users_module_that_fails_to_import_costs_one_line_with_its_place(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    (lab / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(lab)
    code, out, err = run(capsys, "toy", "experiments/case.yaml", "--model.optimizer", "mine.Optimizer")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"command line: model\.optimizer: 'mine\.Optimizer' cannot be imported: .*{told}.*\n", err)


def test_an_interpolation_cycle_is_refused(lab: Path) -> None:
    edit("hidden: 3, decay: 0.8", "hidden: '${let.decay}', decay: '${let.hidden}'")
    with pytest.raises(ConfigError) as caught:
        compose("experiments/case.yaml")
    assert "\n" not in str(caught.value)


def test_a_step_into_an_interpolated_part_is_refused(lab: Path) -> None:
    edit("again: ToyTop", "again: ${model.features}")
    with pytest.raises(
        ConfigError, match=r"^--again\.hidden: again is '\$\{model\.features\}'; change what it points to"
    ):
        compose("experiments/case.yaml", [("again.hidden", "4")])


# ---------------------------------------------------------------------------------------------------------------------
# writing


def test_print_config_reads_back_as_itself(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ["--model.optimizer", "SGD", "--model.table", "{a: ToySoft}", "--trainer.out", "runs/x", "--tags", "{a: {}}"]
    status, text, _ = run(capsys, "toy", "experiments/case.yaml", *over, "--print_config")
    assert status == 0
    assert not CALLS
    assert f"class_path: {__name__}.ToyFused" in text
    Path("experiments/again.yaml").write_text(text)
    assert run(capsys, "toy", "experiments/again.yaml", "--print-config")[1] == text
    first = check(
        compose("experiments/case.yaml", list(zip([o[2:] for o in over[::2]], over[1::2], strict=True))), ToyExperiment
    )
    assert check(compose("experiments/again.yaml"), ToyExperiment).parsed == first.parsed


# fmt: off
NASTY = [
    "1e-4", "null", "yes", "012", "1_000", "12:30", "a: b", "${x}", "a ${b} c", "#x", "", " x", "~",
    "[a]", "ü", "'", "2020-01-01", "a\nb", "- x", "{", "*a", "&a", "!x", "%", "@", "True", ".5", "x" * 200, "a b " * 60,
]
# fmt: on


@pytest.mark.parametrize("text", NASTY)
def test_any_text_reads_back_as_itself(lab: Path, text: str) -> None:
    tree = {"model": MODEL, "trainer": {}, "note": text, "tags": {"a": [text]}}
    Path("experiments/again.yaml").write_text(checked(tree).yaml)
    parsed = check(compose("experiments/again.yaml"), ToyExperiment).parsed
    assert (parsed.note, parsed.tags) == (text, {"a": [text]})


def test_what_is_logged_holds_no_value_from_the_environment(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", "secret")
    edit("let: {", 'let: {key: "${oc.env:TOY_KEY}", ')
    edit(
        "seed: 3", 'seed: 3\nnote: "http://${oc.env:TOY_KEY}/v1"\ntags: {a: "${let.key}", b: ["${tags.a}", "\\\\${x}"]}'
    )
    edit("trainer: {steps: 3}", 'trainer: {out: "${let.key}"}')
    config = check(compose("experiments/case.yaml"), ToyExperiment)
    assert config.parsed.note == "http://secret/v1"
    assert config.plain["tags"] == {"a": "secret", "b": ["secret", "${x}"]}
    assert config.yaml.count("secret") == 4
    assert "secret" not in config.composed.raw_yaml
    assert "secret" not in config.logged_yaml
    assert "note: http://${oc.env:TOY_KEY}/v1" in config.logged_yaml
    for text in (config.composed.raw_yaml, config.logged_yaml):  # both run again
        Path("experiments/again.yaml").write_text(text)
        assert check(compose("experiments/again.yaml"), ToyExperiment).parsed == config.parsed


def test_a_shared_value_picked_by_the_environment_is_not_logged(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_PICK", "decay")
    edit("let: {", 'let: {pick: "${oc.env:TOY_PICK}", ')
    edit("seed: 3", "seed: 3\ntags: {a: '${let.${let.pick}}'}")
    config = check(compose("experiments/case.yaml"), ToyExperiment)
    assert config.parsed.tags == {"a": 0.8}
    assert "a: ${let.${let.pick}}" in config.logged_yaml


def test_a_default_that_is_an_object_cannot_be_written() -> None:
    with pytest.raises(TypeError, match=r"^model\.grow: the default .* is an object"):
        to_yaml({"model": {"init_args": {"grow": ToyBudget(3)}}})


# ---------------------------------------------------------------------------------------------------------------------
# building


def test_parts_are_built_after_seeding(lab: Path) -> None:
    one, two, three = (load("experiments/case.yaml", f"seed={seed}", into=ToyExperiment) for seed in (5, 5, 6))
    assert one.model.features.drawn() == two.model.features.drawn() != three.model.features.drawn()
    load("experiments/case.yaml", "--seed=5", into=ToyExperiment)
    drawn = random.random(), np.random.random()
    load("experiments/case.yaml", "seed=5", into=ToyExperiment)
    assert drawn == (random.random(), np.random.random())


def test_a_notebook_override_needs_an_equals_sign(lab: Path) -> None:
    with pytest.raises(ConfigError, match="^seed: an override is written key=value$"):
        load("experiments/case.yaml", "seed", into=ToyExperiment)


def test_the_key_of_a_refused_part_is_found_among_equals_of_its_class(lab: Path) -> None:
    edit("again: ToyTop", "again: {class_path: ToyFused, init_args: {hidden: -1}}")
    with pytest.raises(ConfigError, match=r"^experiments/case\.yaml:3: again: hidden must be >= 1, got -1$"):
        load("experiments/case.yaml", into=ToyExperiment)


def test_a_refused_part_is_not_taken_for_what_else_the_slot_allows() -> None:
    refused = {"class_path": "ToyFused", "init_args": {"hidden": 0}}
    with pytest.raises(ConfigError, match=r"^x\.yaml: trainer\.either: hidden must be >= 1, got 0$"):
        build(checked({"model": MODEL, "trainer": {"either": refused}}))
    assert build(checked({"model": MODEL, "trainer": {"either": {"hidden": 0}}})).trainer.either == {"hidden": 0}


def test_a_fault_of_ours_in_a_constructor_is_raised_as_it_is() -> None:
    faulty = {"class_path": "ToyFused", "init_args": {"hidden": 1001}}
    with pytest.raises(RuntimeError, match="^a fault of ours$"):
        build(checked({"model": MODEL, "trainer": {}, "again": faulty}))


# ---------------------------------------------------------------------------------------------------------------------
# the command line


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--dry-run"], {"dry_run": True}),
        (["--dry_run", "true", "--count=3"], {"dry_run": True, "count": 3}),
        (["--dry-run", "false"], {}),
        (["--dry-run", "why not"], {"dry_run": True, "prompt": "why not"}),
        (["--json", "out.json", "12"], {"json": Path("out.json"), "prompt": "12"}),
        (["--json", "null"], {}),
        (["${seed} {a: b}"], {"prompt": "${seed} {a: b}"}),
        (["--", "--prompt"], {"prompt": "--prompt"}),
        (["--prompt", "null"], {"prompt": "null"}),
        (["--count", "2", "--count", "3"], {"count": 3}),
        (["--count", "-1", "--prompt=--x"], {"count": -1, "prompt": "--x"}),
    ],
)
def test_options_go_to_the_verb(
    lab: Path, capsys: pytest.CaptureFixture[str], words: list[str], options: dict[str, Any]
) -> None:
    assert run(capsys, "toy", "experiments/case.yaml", *words) == (0, "", "")
    ((experiment, given),) = CALLS
    assert given == {"json": None, "dry_run": False, "prompt": "", "count": 1, "how": "fast"} | options
    assert experiment.seed == 3


def test_the_experiment_may_stand_anywhere(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--dry-run", "experiments/case.yaml", "--seed", "4"],
        ["--seed=4", "--dry-run", "experiments/case.yaml"],
    ):
        assert run(capsys, "toy", *words)[0] == 0
        experiment, given = CALLS.pop()
        assert (experiment.seed, given["dry_run"]) == (4, True)


def test_interruption_has_its_own_status(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "toy", "experiments/case.yaml", "interrupt") == (130, "", "interrupted\n")


def test_termination_unwinds_once_and_has_its_own_status(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "toy", "experiments/case.yaml", "terminate") == (143, "", "terminated\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_caller_that_handles_sigterm_keeps_it(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert run(capsys, "toy", "experiments/case.yaml", "terminate")[0] == 130
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tyo"], "tyo: no such verb; did you mean 'toy'?"),
        (["toy"], "toy: no experiment given; write: python -m eagle3_lab toy EXPERIMENT.yaml [--key value ...]"),
        (["toy", "experiments/cas.yaml"], "no file experiments/cas.yaml; did you mean 'experiments/case.yaml'?"),
        (["toy", "case"], "no file case; did you mean 'experiments/case.yaml'?"),
        (["toy", "experiments"], "experiments: is a folder, name a file; there are: experiments/case.yaml"),
        (["toy", "--model.features.help", "ToyFusd"], "--model.features.help: 'ToyFusd' is no ToyFeatures; did you"),
        (["toy", "--model.featurs.help"], "--model.featurs.help: model.featurs: unknown key; did you mean 'features'?"),
        (["toy", "--seed.help"], "--seed.help: seed is no part but int"),
        (["toy", "--model.features.hidden.help"], "--model.features.hidden.help: the class of model.features decides"),
    ],
)
def test_a_wrong_command_line_costs_one_line(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr("eagle3_lab.config.reading.PACKAGE", lab / "nothing")
    status, out, err = run(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)


def test_help_lists_verbs_keys_and_classes(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        status, out, _ = run(capsys, *words)
        assert status == 0
        assert all(f"  {verb}" in out for verb in front.VERBS)
    for words in (["--help"], ["experiments/case.yaml", "-h"]):
        status, out, _ = run(capsys, "toy", *words)
        assert status == 0
        for text in ("Do nothing, and remember", "--model MODEL", "what is trained.", "--dry_run", "where the result"):
            assert text in out
        assert "Unset" not in out
        assert "--config" not in out
    assert run(capsys, "toy", "--model.features.help")[1].startswith("ToyFused  Several layers in one.\nToyTop    The")
    assert "--hidden HIDDEN  the width. (required" in run(capsys, "toy", "--model.features.help", "ToyFused")[1]
    assert "--weight" in run(capsys, "toy", "--model.losses.help", "ToySoft")[1]
    assert "--depth" in run(capsys, "toy", "--model.unroll.help")[1]


def test_help_and_mistakes_in_files_do_not_load_torch(lab: Path) -> None:
    edit("seed: 3", "seed: 3\nseed: 4")
    code = (
        "import sys; from eagle3_lab.__main__ import main; "
        "assert main(['--help']) == 0; assert main(['fit', 'experiments/case.yaml']) == 2; "
        "assert main(['fit', 'none.yaml']) == 2; assert 'torch' not in sys.modules"
    )
    root = Path(front.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "experiments/case.yaml:13: found duplicate key seed"


@pytest.mark.parametrize("module", [eagle3_lab.errors, eagle3_lab.config.editing])
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_a_legal_name_that_is_no_plain_text_stays_on_the_line() -> None:
    assert near("zzz", ["a\nb", "depth"]) == "; legal: 'a\\nb', depth"
