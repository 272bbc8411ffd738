"""The heads of an ablation's cells under one decoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ablation_toys import Toy

from eagle3_lab.ablation import decoding, results

DECODE = """\
decode:
  tasks: [{name: held_out, limit: 2}]
  max_new_tokens: 6
  laws:
    T0: SamplingLaw
    T1: {class_path: SamplingLaw, init_args: {temperature: 1.0}}
  methods:
    chain: {class_path: HeadTree, init_args: {head: deep, grow: {class_path: Chain, init_args: {length: 3}}}}
    tree: {class_path: HeadTree, init_args: {head: flat, grow: McSim7b63}}
figures: [speedup]
"""


@pytest.fixture
def decoded(done: Toy, tmp_path: Path) -> Toy:
    """The finished ablation with a decode section, in a folder of its own; its heads are in the same store."""
    toy = Toy(tmp_path / "decoded" / "depth", done.runs)
    shutil.copytree(done.folder, toy.folder)
    toy.change("figures: [tau, n_alpha]\n", DECODE)
    return toy


def test_the_best_seed_of_each_cell_is_decoded_once(decoded: Toy) -> None:
    assert decoded.run("ablate", "--list").out.splitlines()[-1].split() == ["decoding", "left"]
    ran = decoded.run("ablate")
    assert ran.code == 0, ran.err
    told = json.loads((decoded.folder / "decoding.json").read_text())
    ablation = decoded.read()
    found = results.found(ablation)
    for method, cell in (("chain", "deep"), ("tree", "flat")):
        best = max((f"{cell}-{seed}" for seed in (0, 1)), key=lambda title: found[title].values["tau_visited"]["value"])
        assert told["heads"][method] == best
    rows = told["table"]["methods"]
    assert {(row["name"], row["law"]) for row in rows} == {
        (m, law) for m in ("vanilla", "chain", "tree") for law in ("T0", "T1")
    }
    greedy = {row["tokens"] for row in rows if row["law"] == "T0"}
    assert len(greedy) == 1, "lossless"
    again = decoded.run("ablate")
    assert again.code == 0 and "evaluation" not in again.err
    assert decoded.run("ablate", "--list").out.splitlines()[-1].split() == ["decoding", "done"]
    assert decoded.run("report").code == 0
    readme = (decoded.folder / "README.md").read_text()
    assert "| decoded | T0: tau | T0: speed-up | T1: tau | T1: speed-up |" in readme
    assert "![speedup](figures/speedup.svg)" in readme


def test_a_head_that_is_no_cell_and_a_method_that_cannot_use_its_head_are_refused(decoded: Toy, toy: Toy) -> None:
    decoded.change("{head: deep", "{head: depe")
    told = decoded.run("ablate").err.splitlines()[-1]
    assert "decode.methods.chain.head: no cell 'depe'; did you mean 'deep'?" in told and "ablation.yaml:" in told
    toy.change("figures: [tau, n_alpha]\n", DECODE)
    toy.change(
        "HeadTree, init_args: {head: deep, grow: {class_path: Chain, init_args: {length: 3}}}",
        "DraftLM, init_args: {head: deep}",
    )
    ran = toy.run("ablate", "--cell", "deep")
    assert ran.code == 2 and "training" not in ran.err
    assert "decode: evaluate.methods.chain: " in ran.err.splitlines()[-1]
    assert decoding.find(toy.read(), {}) is None
