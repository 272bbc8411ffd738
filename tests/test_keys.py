"""Keys by content: every option is decided about, docs/keys.md says the same, and no module's place changes a key."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

import pytest
from lightning.pytorch.callbacks import Callback
from tiny import TinyLab

from eagle3_lab import load
from eagle3_lab.config import schema
from eagle3_lab.config.checking import not_in_yaml
from eagle3_lab.config.key_options import OPTIONS, markdown
from eagle3_lab.config.keys import PACKAGE, chosen, reduced, short_name
from eagle3_lab.config.reading import FREE
from eagle3_lab.data.generation.answers import Answers
from eagle3_lab.data.sources.fields import Fields
from eagle3_lab.data.sources.hub import HubPrompts
from eagle3_lab.data.sources.prompt_files import PromptFiles
from eagle3_lab.data.sources.self_written import SelfWritten
from eagle3_lab.experiment import Experiment
from eagle3_lab.target_model.loading import TargetChoice, model_hash
from eagle3_lab.training.loss.terms import SoftCE

ROOT = Path(__file__).parents[1]

SMALL = """\
name: small
target: {model: some/model}
data: {path: talks.jsonl}
model: {features: FusedFeature, draft: Eagle3, unroll: {depth: 3}, losses: [SoftCE], draft_vocab: 64}
optimizer: {lr: 3.0e-3}
trainer: {max_steps: 6}
features: {dtype: float32}
evaluate:
  tasks: [{name: held_out, limit: 2}]
  methods: {chain: {class_path: HeadTree, init_args: {grow: {class_path: Chain, init_args: {length: 3}}}}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


class WeightedCE(SoftCE):
    """A term of a user's own module."""


# --------------------------------------------------------------------------------------------------------- the table


def classes(cls: type, found: dict[type, dict[str, schema.Slot]]) -> dict[type, dict[str, schema.Slot]]:
    """Every class of the package that an experiment's YAML can name, and its options; but for callbacks that `fit` adds
    itself, which are made of what no YAML holds."""
    if cls not in found:
        found[cls] = schema.slots(cls, not_in_yaml(cls) if cls is Experiment else frozenset())
        for slot in found[cls].values():
            for part in schema.choices(schema.contained_bases(slot.type)):
                if part.__module__.startswith(f"{PACKAGE}.") and not issubclass(part, Callback):
                    classes(part, found)
    return found


def test_every_option_of_the_schema_is_decided_about_and_nothing_else() -> None:
    there = {cls.__qualname__: {*slots} for cls, slots in classes(Experiment, {}).items() if slots}
    decided = {name: {*options} for name, options in OPTIONS.items()}
    assert decided == there, "decide about a new option in key_options.py, and renew docs/keys.md"


def test_mappings_whose_names_a_user_chooses_are_known_to_the_reader() -> None:
    """A class's name as the only key is a part in short form everywhere else."""
    options = [(name, slot.type) for slots in classes(Experiment, {}).values() for name, slot in slots.items()]
    free = {name for name, kind in options if any(get_origin(one) in (dict, Mapping) for one in schema.members(kind))}
    assert free - {"max_time", "val_check_interval"} == {*FREE} - {"let", "cells"}, "those two take units of time"


def test_no_two_classes_have_one_name_since_keys_know_them_by_it() -> None:
    names = [cls.__qualname__ for cls in classes(Experiment, {})]
    assert len(names) == len({*names}) > 50


def test_the_table_in_the_documents_is_the_one_in_the_code() -> None:
    assert markdown() in (ROOT / "docs" / "keys.md").read_text(), "write eagle3_lab.config.key_options.markdown() there"
    assert all(decision.why for options in OPTIONS.values() for decision in options.values())


# ---------------------------------------------------------------------------------------------------- what keys know


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.enable_progress_bar=true",),
        ("trainer.save_every_minutes=9",),
        ("trainer.val_check_interval=2", "trainer.limit_val_batches=1", "judged_depth=3"),
        ("model.budget_mib=64",),
        ("model.compile=true",),
        ("features.layers=[1]", "features.threads=0", "features.folder=elsewhere"),
        ("target.device=cpu", "target.pack=false", "target.attention=eager", "target.probe=false"),
        ("data.path=elsewhere/talks.jsonl", "target.model=moved"),  # their content is another part of the key
        ("evaluate.max_new_tokens=3",),
        ("budgets.training=3", "tracking.folder=there"),
    ],
)
def test_what_decides_no_weight_is_in_no_training_key(small: Path, words: tuple[str, ...]) -> None:
    assert load(small, *words).training_key({}) == load(small).training_key({})


@pytest.mark.parametrize(
    "word",
    ["seed=1", "data.seed=1", "model.unroll.depth=2", "features.dtype=bfloat16", "trainer.accumulate_grad_batches=2",
     "model.draft.rope_base=10000", "model.losses=[HardCE]", "target.dtype=bfloat16", "optimizer.lr=1.0e-3"],
)  # fmt: skip
def test_what_decides_a_weight_is_in_the_training_key(small: Path, word: str) -> None:
    assert load(small, word).training_key({}) != load(small).training_key({})
    assert load(small).training_key({"the conversations": "a"}) != load(small).training_key({"the conversations": "b"})


def test_validation_counts_where_a_callback_may_watch_it(small: Path) -> None:
    watched = (
        "trainer.callbacks=[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val/loss}}]"
    )
    often = load(small, watched, "trainer.limit_val_batches=1").training_key({})
    assert often != load(small, watched).training_key({}) != load(small).training_key({})


def test_an_evaluation_is_known_by_its_options_and_what_they_lead_to(small: Path, tmp_path: Path) -> None:
    def key(*words: str, **contents: object) -> str:
        return load(small, *words).evaluation_key(contents)

    plain = key()
    assert key("model.budget_mib=64", "trainer.max_steps=7", "target.model=moved", "target.probe=false") == plain
    assert key("evaluate.tasks=[{name: held_out, limit: 1}]") == plain, "prompts count by their texts"
    others = [key("target.pack=false"), key("seed=1"), key("evaluate.methods.chain.grow.length=2"), key(asked=["a"])]
    assert len({plain, *others}) == 5
    auto = "evaluate.methods={auto: {class_path: HeadTree, init_args: {grow: {class_path: AutoTree, init_args: %s}}}}"
    auto %= f"{{measured: {tmp_path / 'costs.json'}}}"
    shapes = []
    for levels in (2, 3):
        tree = {"levels": levels, "width": 2, "budget": 4}
        (tmp_path / "costs.json").write_text(json.dumps({"trees": [tree]}))
        shapes.append(key(auto))
    assert shapes[0] != shapes[1] == key(auto)


def test_a_draft_model_counts_by_the_files_of_its_folder(tiny: TinyLab, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    for file in tiny.target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert model_hash(str(folder)) == model_hash(str(tiny.target)) != str(folder)
    (folder / "README.md").write_text("nothing of the model")
    assert model_hash(str(folder)) == model_hash(str(tiny.target))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert model_hash(str(folder)) != model_hash(str(tiny.target))
    assert model_hash("embedded") == "embedded"


def test_a_targets_settings_count_and_who_wrote_them_does_not(tiny: TinyLab, tmp_path: Path) -> None:
    def settings(**changed: Any) -> str:
        for file in tiny.target.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tiny.target / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        return TargetChoice(str(tmp_path)).load().spec.settings_hash

    assert settings() == settings(transformers_version="5.99", dtype="bfloat16") != ""
    assert settings() != settings(rms_norm_eps=1e-3)


# -------------------------------------------------------------------------------------------------- no module's place


def moved(tree: Any) -> Any:
    """The configuration after every module of the package was moved."""
    if isinstance(tree, dict):
        return {key: moved(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [moved(value) for value in tree]
    if isinstance(tree, str) and tree.startswith(f"{PACKAGE}."):
        return f"{PACKAGE}.rooms.other.{tree.rpartition('.')[2]}"
    return tree


def test_a_moved_module_changes_no_key(small: Path) -> None:
    plain = load(small).choices()
    assert moved(plain) != plain
    for key in ("training", "evaluation"):
        kept = reduced(plain, (key,))
        assert reduced(moved(plain), (key,)) == kept
        assert PACKAGE not in json.dumps(kept)
    assert short_name("eagle3_lab.draft.eagle3.Eagle3") == "Eagle3"


def test_a_class_of_a_users_own_module_counts_by_its_full_path_and_all_its_options(small: Path) -> None:
    own = {"class_path": f"{__name__}.WeightedCE", "init_args": {"weight": 2.0}}
    assert reduced(copy.deepcopy(own), ("training",)) == own
    assert load(small, f"model.losses=[{__name__}.WeightedCE]").training_key({}) != load(small).training_key({})


# ------------------------------------------------------------------------------------------------- what was answered


def others(options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Another value for each option that is a number, a word or null."""
    for name, value in options.items():
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int | float):
            yield name, value + 1
        elif isinstance(value, str):
            yield name, f"{value}x"
        elif value is None:
            yield name, 1


@pytest.mark.parametrize(
    "make, given",
    [
        (PromptFiles, {"path": "package:fresh_prompts", "source": "s", "licence": "l", "limit": None}),
        (
            HubPrompts,
            {
                "fields": Fields(question=("q",)),
                "name": "a/b",
                "config": "c",
                "split": "s",
                "revision": "r",
                "source": "s",
                "licence": "l",
            },
        ),
        (SelfWritten, {"count": 3, "temperature": 1.0, "max_tokens": 9, "rows": 2, "seed": 0, "licence": "l"}),
    ],
)
def test_prompts_are_known_by_what_the_table_says(make: type, given: dict[str, Any]) -> None:
    for name, value in others(given):
        decision = OPTIONS[make.__name__][name]
        if make is PromptFiles and name == "path":
            continue  # its file is not there
        changed = make(**given | {name: value}).identity() != make(**given).identity()
        assert changed == bool(decision.values | decision.contents), name


def test_answers_are_known_by_what_the_table_says() -> None:
    one = Answers()
    assert {*chosen("Answers", vars(one), "answers")} == {"limit", "temperature", "max_new_tokens", "rows", "seed"}
    assert chosen("Answers", vars(replace(one, rows=1)), "answers")["rows"] == 1
    with pytest.raises(KeyError):
        chosen("Answers", {"new": 1}, "answers")
