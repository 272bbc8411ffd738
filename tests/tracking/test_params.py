"""A configuration as the run list shows it."""

from __future__ import annotations

from pathlib import Path

from eagle3_lab.tracking.params import flatten


def test_keys_are_those_of_the_command_line_and_parts_go_by_their_class() -> None:
    tree = {
        "seed": 7,
        "model": {
            "draft": {"class_path": "eagle3_lab.draft.llama.EagleLayer", "init_args": {"bias": False, "heads": None}},
            "losses": [{"class_path": "theirs.SoftCE", "init_args": {"weight": 1.0}}, {"class_path": "eagle3_lab.L1"}],
            "source": {"class_path": "eagle3_lab.draft.features.TopFeature", "init_args": {}},
        },
        "data": {"folder": Path("data"), "files": [], "extra": {}},
    }
    assert flatten(tree) == {
        "seed": "7",
        "model.draft": "EagleLayer",
        "model.draft.bias": "false",
        "model.draft.heads": "null",
        "model.losses.0": "theirs.SoftCE",
        "model.losses.0.weight": "1.0",
        "model.losses.1": "L1",
        "model.source": "TopFeature",
        "data.folder": "data",
        "data.files": "[]",
        "data.extra": "{}",
    }
