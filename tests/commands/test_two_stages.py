"""HASS's two stages, as the second one's file says: the second goes on from the first's head."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from tiny import TinyLab

from eagle3_lab.__main__ import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def run(name: str, tiny: TinyLab, folder: Path, *more: str) -> tuple[int, str, str]:
    """One of the repository's own files on the tiny target, in a few steps."""
    return told("fit", str(EXPERIMENTS / f"{name}.yaml"), *smaller(tiny), f"--tracking.folder={folder}", *more)


def smaller(tiny: TinyLab) -> list[str]:
    words = [f"--target.model={tiny.target}", f"--data.path={tiny.data}", "--data.max_length=96", "--evaluate=null"]
    words += ["--data.row_length=128", "--trainer.max_steps=4", "--trainer.val_check_interval=2"]
    words += ["--trainer.products=float32"]
    return words


def run_file(name: str, tiny: TinyLab) -> str:
    """That file with these choices in it, as ``--print_config`` writes it."""
    code, out, err = told("fit", str(EXPERIMENTS / f"{name}.yaml"), *smaller(tiny), "--print_config")
    assert code == 0, err
    return out


def told(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def first(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first stage's head, read off what ``fit`` says at its end."""
    code, out, err = run("hass_stage1", tiny, tmp_path_factory.mktemp("first"))
    assert code == 0, err
    named = re.search(r"^checkpoint: (\S+)$", out, flags=re.MULTILINE)
    assert named is not None
    return Path(named[1])


def test_the_second_stage_goes_on_from_the_head_that_the_first_one_names(
    first: Path, tiny: TinyLab, tmp_path: Path
) -> None:
    # a rate of next to nothing: what is trained is what was begun with
    words = ("--model.start", str(first), "--optimizer.lr", "1.0e-12")
    code, out, err = run("hass_stage2", tiny, tmp_path, *words)
    assert code == 0, err
    (second,) = tmp_path.glob("work/hass_stage2-*/draft.ckpt")
    assert f"checkpoint: {second}" in out
    before, after = (torch.load(path, weights_only=True)["state_dict"] for path in (first, second))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    again = run("hass_stage2", tiny, tmp_path, *words)
    assert "training: reused (unchanged)" in again[2]


def test_without_the_first_stages_head_it_says_what_is_missing(tiny: TinyLab, tmp_path: Path) -> None:
    code, out, err = run("hass_stage2", tiny, tmp_path)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if "model.start" in line]
    assert f"trains for target 'embedded', this is '{tiny.target}'" in line
    code, out, err = run("hass_stage2", tiny, tmp_path, "--model.start", "experiments/hass_stage1.yaml")
    assert (code, out) == (2, "")
    (named,) = [line for line in err.splitlines() if "model.start" in line]
    assert named.startswith("command line: model.start: "), "a name with its ending is no content"
    assert f"trains for target 'embedded', this is '{tiny.target}'" in named
    code, out, err = run("hass_stage2", tiny, tmp_path, "--model.start", str(tmp_path / "none.ckpt"))
    assert (code, out) == (2, "")
    assert f"checkpoint: no file {tmp_path / 'none.ckpt'}" in err.splitlines()[-1]


def test_a_head_of_another_family_is_refused_in_one_line(first: Path, tiny: TinyLab, tmp_path: Path) -> None:
    code, out, err = run("eagle3", tiny, tmp_path, "--model.draft_vocab", "64", "--model.start", str(first))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"command line: model.start: {first}: holds Eagle1 on TopFeature, the experiment has Eagle3 on FusedFeature; "
        "use a YAML with the same model.draft and model.features"
    )


def test_a_stage_names_the_experiment_it_goes_on_from(tiny: TinyLab, tmp_path: Path) -> None:
    stage1, stage2 = tmp_path / "stage1.yaml", tmp_path / "stage2.yaml"
    stage1.write_text(run_file("hass_stage1", tiny))
    stage2.write_text(run_file("hass_stage2", tiny).replace("experiments/hass_stage1", str(stage1.with_suffix(""))))
    store = f"--tracking.folder={tmp_path}"
    code, _, err = told("fit", str(stage2), store)
    assert code == 2
    (line,) = [line for line in err.splitlines() if "model.start" in line]
    assert line.startswith(f"{stage2}:") and line.endswith(
        f"model.start: {stage1}: no head of it, as it is written, is in {tmp_path} yet; run `python -m eagle3_lab fit "
        f"{stage1}` first"
    )
    assert told("fit", str(stage1), store)[0] == 0
    code, _, err = told("fit", str(stage2), store)
    assert code == 0, err
    assert told("fit", str(stage2), store)[2].count("training: reused (unchanged)") == 1


def test_the_first_command_stands_at_the_files_head() -> None:
    head = (EXPERIMENTS / "hass_stage2.yaml").read_text().partition("\nname:")[0]
    assert "fit experiments/hass_stage1.yaml" in head
