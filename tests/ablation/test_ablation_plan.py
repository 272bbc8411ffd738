"""From a file to cells: what is laid over what, which cells are the same, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from ablation_toys import Toy

from eagle3_lab.ablation import identity
from eagle3_lab.ablation.plan import Cell, read_ablation
from eagle3_lab.data.module import ConversationData

SCALES = "scales: [1, 2, 4]\nfigures:"


def trainer(cell: Cell) -> dict:
    given = cell.config.plain["trainer"]
    return given.get("init_args", given)


def data(cell: Cell) -> dict:
    given = cell.config.plain["data"]
    return given.get("init_args", given)


def test_cells_are_the_files_lines_at_every_scale_with_every_seed(toy: Toy) -> None:
    toy.change("figures:", f"seeds: [3, 5]\n{SCALES}")
    toy.change("  flat: {", "  flat: {scales: [4], ")
    cells = toy.read().cells
    assert [cell.title for cell in cells] == [
        *(f"deep-x{scale}-{seed}" for scale in (1, 2, 4) for seed in (3, 5)),
        "flat-x4-3",
        "flat-x4-5",
    ]
    assert [(trainer(c)["max_steps"], data(c)["share"]) for c in cells[::2]] == [
        (2, 0.25),
        (3, 0.5),
        (6, 1.0),
        (6, 1.0),
    ]
    assert [(c.config.plain["seed"], data(c)["seed"]) for c in cells[:2]] == [(3, 3), (5, 5)]
    assert cells[0].settings["model.unroll.depth"] == "2" and cells[-1].settings["model.unroll.depth"] == "1"
    assert "optimizer.lr" not in cells[0].settings, "the same in all"


def test_the_same_steps_at_a_smaller_scale_are_more_passes(toy: Toy) -> None:
    toy.change("figures:", f"steps: same\n{SCALES}")
    assert [trainer(cell)["max_steps"] for cell in toy.read().cells] == [6] * 6
    toy.change("max_steps: 6", "max_epochs: 2")
    assert [trainer(cell)["max_epochs"] for cell in toy.read().cells] == [8, 4, 2] * 2
    toy.change("steps: same", "steps: scaled")
    assert [trainer(cell)["max_epochs"] for cell in toy.read().cells] == [2] * 6


def test_a_cell_may_begin_from_a_whole_experiment_and_shared_lines_lie_over_it(toy: Toy) -> None:
    text = (toy.folder / "ablation.yaml").read_text()
    whole = [
        line[2:]
        for line in text.splitlines()
        if line.startswith("  ") and "depth: 1" not in line and "deep" not in line
    ]
    (toy.folder / "other.yaml").write_text("\n".join(whole).replace("draft_vocab: 64", "draft_vocab: 32"))
    toy.change("cells:", "shared: {optimizer: {lr: 1.0e-2}}\ncells:\n  other: {experiment: other.yaml}")
    other, deep, flat = (cell.config.plain for cell in toy.read().cells)
    model = [one["model"].get("init_args", one["model"]) for one in (other, deep, flat)]
    assert [one["draft_vocab"] for one in model] == [32, 64, 64]
    assert {one["optimizer"].get("init_args", one["optimizer"])["lr"] for one in (other, deep, flat)} == {0.01}


SHOWS_SAVES_OR_BOUNDS = {
    "name": "else",
    "tracking.folder": "elsewhere",
    "budgets.training": "3",
    "features.threads": "0",
    "features.folder": "elsewhere",
    "features.layers": "[1]",
    "model.budget_mib": "64",
    "model.compile": "true",
    "target.device": "cpu",
    "target.pack": "false",
    "target.probe": "false",
    "trainer.save_every_minutes": "9",
    "trainer.log_every_n_steps": "2",
    "trainer.enable_progress_bar": "true",
    "trainer.val_check_interval": "2",
    "trainer.limit_val_batches": "2",
}


def test_options_that_show_or_schedule_saves_or_bound_memory_change_no_key(toy: Toy) -> None:
    deep, flat = toy.read().cells
    others = read_ablation(toy.folder, list(SHOWS_SAVES_OR_BOUNDS.items())).cells
    assert identity.cell_options(others[0].config) == identity.cell_options(deep.config)
    assert [cell.key for cell in others] == [deep.key, flat.key]


def test_a_key_holds_neither_places_nor_defaults(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = toy.read().cells[0]
    assert str(tmp_path) not in str(identity.cell_options(deep.config)), "files count by their content"
    for key, text in (("model.step_decay", "0.8"), ("model.draft", "eagle3_lab.draft.eagle3.Eagle3")):
        assert read_ablation(toy.folder, [(key, text)]).cells[0].key == deep.key, key
    monkeypatch.setattr(identity, "VERSION", identity.VERSION + 1)
    assert toy.read().cells[0].key != deep.key


def test_what_decides_a_cells_result_changes_its_key(toy: Toy) -> None:
    deep = toy.read().cells[0]
    for key, text in {
        "optimizer.lr": "1e-3",
        "model.step_decay": "0.9",
        "model.features": "TopFeature",
        "features.dtype": "bfloat16",
        "trainer.max_steps": "7",
        "judged_depth": "3",
        "answers": "{prompts: package:fresh_prompts}",
        "evaluate": "{tasks: [{name: own, path: own.jsonl}], methods: {}}",
        "trainer.callbacks": "[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: a}}]",
    }.items():
        assert read_ablation(toy.folder, [(key, text)]).cells[0].key != deep.key, key


def test_the_conversations_of_a_scale_are_within_the_next_ones(toy: Toy) -> None:
    from eagle3_lab.config import build
    from eagle3_lab.data.chat import Chat

    toy.change("figures:", SCALES)
    toy.change("  flat: {model: {unroll: {depth: 1}}}\n", "")
    chosen: list[list[str]] = []
    kept: set[str] = set()
    for cell in toy.read().cells:
        experiment = build(cell.config)
        target, found = experiment.target.load(), experiment.data
        assert isinstance(found, ConversationData)
        found.build(Chat(target.tokenizer), target.spec)
        chosen.append([one.conversation.id for one in found.train])
        kept.add(found.kept_hash)
        assert len(found.all_documents()) == len(chosen[-1]) + len(found.held_out) or cell.scale < 4
    assert len(kept) == 1, "one store of features serves all"
    assert [len(one) for one in chosen] == [round(len(chosen[2]) / 4), round(len(chosen[2]) / 2), len(chosen[2])]
    assert chosen[2][: len(chosen[1])] == chosen[1] and chosen[1][: len(chosen[0])] == chosen[0]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("{unroll: {depth: 1}}", "{unrol: {depth: 1}}", "model.unrol: unknown key; did you mean 'unroll'?"),
        ("deep: {}", "deep: {seed: 0}", "cells.deep.seed: is set from the ablation's seeds and scales; write those"),
        (
            "deep: {}",
            "deep: {data: {share: 0.5}}",
            "cells.deep.data.share: is set from the ablation's seeds and scales",
        ),
        (
            "{model: {unroll: {depth: 1}}}",
            "{model: {unroll: {depth: 2}}}",
            "flat-0 is the same configuration as deep-0",
        ),
        ("figures: [tau, n_alpha]", "figures: [tau, alpha]", "figures: 'alpha' is no figure"),
        ("figures: [tau, n_alpha]", "figures: [tau_by_data]", "needs several data scales, the ablation has [1]; add"),
        (
            "figures: [tau, n_alpha]",
            "figures: [speedup]",
            "needs decoded speed-ups, the ablation has no decode section",
        ),
        ("figures: [tau, n_alpha]", "agianst: deep", "agianst: unknown key; did you mean 'against'?"),
        ("figures: [tau, n_alpha]", "against: depe", "against: no cell 'depe'; did you mean 'deep'?"),
        ("figures: [tau, n_alpha]", "seeds: []", "seeds must be at least one number, none of them twice, got []"),
        ("figures: [tau, n_alpha]", "scales: [0]", "seeds must be >= 0 and scales >= 1, got [0] and [0]"),
        ("cells:", "cells:\n  'a b': {}", "cells.a b: a name is letters, digits and '_', not digits alone"),
        ("cells:", "cells:\n  7: {}", "key '7' is no text"),
        ("cells:", "cells:\n  x: {experiment: none.yaml}", "no file"),
        (
            "cells:",
            "cells:\n  x: {scales: [2], trainer: {max_epochs: 2}}\n  y: {scales: [1], trainer: {max_epochs: 2}}",
            "leave one",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(toy: Toy, old: str, new: str, line: str) -> None:
    toy.change(old, new)
    ran = toy.run("ablate", "--list")
    assert (ran.code, ran.out) == (2, "")
    (told,) = ran.err.splitlines()
    assert line in told and "ablation.yaml" in told


def test_a_folder_without_an_ablation_and_a_cell_that_is_none_are_refused(toy: Toy, tmp_path: Path) -> None:
    assert Toy(tmp_path, toy.runs).run("ablate").err.strip().endswith("is not there); name a folder that has one")
    assert "--cell: depth has no cell 'depe'; did you mean 'deep'?" in toy.run("ablate", "--cell", "depe").err
    assert "--cell: 3, but depth has cells 1 .. 2; see --list" in toy.run("ablate", "--cell", "3").err
    assert toy.run("ablate", "--jobs", "0").err == "--jobs: must be >= 1, got 0\n"
    assert [cell.title for cell in toy.read().chosen("flat")] == ["flat-0"]
    assert toy.read().chosen("2") == toy.read().chosen("flat-0")
