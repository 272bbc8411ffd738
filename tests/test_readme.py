"""The README is run: its commands are read off it, and its worked example is done step by step."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_lab.__main__ import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in reading order."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of a program in the bash blocks, comments dropped."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[len(program.split()) :] for line in lines if line.startswith(program)]


@pytest.mark.parametrize("arguments", commands("python -m eagle3_lab"), ids=" ".join)
def test_every_command_parses(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stop = [] if "--help" in arguments else ["--print_config"]
    assert main([*arguments, *stop]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 10


@pytest.mark.parametrize("target", [c[0] for c in commands("make")])
def test_every_make_target_exists(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_notebook_lines_load_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    notebook = next(block for block in blocks("python") if "fit(load(" in block)
    asked: list[object] = []
    monkeypatch.setattr("eagle3_lab.commands.fit.fit", asked.append)
    exec(compile(notebook, "README.md", "exec"), {})  # noqa: S102
    assert asked[0].model.unroll.depth == 3
    assert asked[0].name == "depth3"


def test_a_method_is_added_by_one_class_and_one_line_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four steps of the README: its class into a module, its line into a YAML, and a loss that uses it."""
    from eagle3_lab import load

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(next(block for block in blocks("python") if "class LikelyCE" in block))
    (line,) = (block.rstrip("\n") for block in blocks("yaml") if "mine.LikelyCE" in block)
    quickstart = (ROOT / "experiments/quickstart.yaml").read_text()
    changed = re.sub(r"^  losses: .*$", line, quickstart, flags=re.MULTILINE)
    assert changed != quickstart
    (tmp_path / "mine.yaml").write_text(changed.replace("common/", f"{ROOT}/experiments/common/"))
    try:
        (term,) = load(str(tmp_path / "mine.yaml")).model.losses
        teacher = type("Teacher", (), {"p": torch.tensor([[0.5, 0.495, 0.005]])})()
        value = term.per_row(torch.tensor([[0.5, 0.25, 0.25]]).log(), teacher)
        assert float(value) == pytest.approx(0.5 * 0.6931 + 0.495 * 1.3863, abs=1e-3)
    finally:
        sys.modules.pop("mine", None)


def test_the_evaluation_that_the_readme_shows_is_one(tmp_path: Path) -> None:
    from eagle3_lab import load
    from eagle3_lab.evaluation import Evaluation

    (shown,) = (block for block in blocks("yaml") if block.startswith("evaluate:"))
    (tmp_path / "shown.yaml").write_text(re.sub(r"^  ", "", shown.partition("\n")[2], flags=re.MULTILINE))
    evaluation = load(str(tmp_path / "shown.yaml"), into=Evaluation)
    assert [task.name for task in evaluation.tasks] == ["mt_bench", "gsm8k", "mine"]
    assert {name: law.temperature for name, law in evaluation.by_law.items()} == {"T0": 0.0, "T1": 1.0}
    assert evaluation.methods["eagle"].levels == 8


def test_files_and_folders_that_the_readme_names_exist() -> None:
    named = re.findall(r"`([\w./]+\.(?:md|py|yaml))`", README)
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).is_file() or (ROOT / "eagle3_lab" / name).is_file() or name == "mine.py", name
