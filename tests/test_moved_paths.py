"""A part's import path of version 0.1.0, in a user's YAML: one line that names the new path."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import eagle3_lab.config
from eagle3_lab.__main__ import main
from eagle3_lab.config import schema
from eagle3_lab.experiment import Experiment

MOVED = json.loads(Path(eagle3_lab.config.__file__).with_name("moved.json").read_text())
EAGLE3 = Path(__file__).parents[1] / "experiments" / "eagle3.yaml"


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_path_leads_to_a_class_and_is_none_itself(old: str) -> None:
    module, _, name = MOVED[old].rpartition(".")
    assert isinstance(vars(importlib.import_module(module))[name], type)
    module, _, name = old.rpartition(".")
    try:
        assert name not in vars(importlib.import_module(module))
    except ModuleNotFoundError:
        pass


def test_a_moved_path_in_a_yaml_costs_one_line_that_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(EAGLE3), "--model.draft", "eagle3_lab.draft.layer.Eagle3"]) == 2
    assert capsys.readouterr().err == (
        "command line: model.draft: 'eagle3_lab.draft.layer.Eagle3' has moved to eagle3_lab.draft.eagle3.Eagle3; write "
        "Eagle3, the class name alone\n"
    )


def test_a_class_name_alone_is_enough_for_every_part_that_has_moved() -> None:
    bases = {base for slot in schema.slots(Experiment).values() for base in schema.contained_bases(slot.type)}
    for new in MOVED.values():
        module, _, name = new.rpartition(".")
        cls = vars(importlib.import_module(module))[name]
        if cls in schema.choices(tuple(bases)):
            assert schema.find_class(name, tuple(base for base in bases if issubclass(cls, base))) is cls
