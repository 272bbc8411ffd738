"""README and docs are run: their commands are read from the pages, and the worked example is done step by step."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import laws
import pytest
import torch
from mlflow.tracking import MlflowClient
from tiny import TinyLab

from eagle3_lab import load
from eagle3_lab.__main__ import main
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.tree_shapes import Chain
from eagle3_lab.pipeline import head_module, inputs
from eagle3_lab.tracking.run import store_uri
from eagle3_lab.types import Batch, Needs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {page: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in reading order."""
    return re.findall(rf"```{language}\n(.*?)```", "\n".join(PAGES.values()), flags=re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of a program in the bash blocks, comments dropped."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[len(program.split()) :] for line in lines if line.startswith(program)]


@pytest.mark.parametrize("arguments", commands("python -m eagle3_lab"), ids=" ".join)
def test_every_command_parses(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stop = [] if "--help" in arguments else ["--help" if arguments[0] in ("ablate", "report") else "--print_config"]
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


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Steps 1 and 2 of the README: its class in a module on the path, its line in a copy of the quickstart."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(next(block for block in blocks("python") if "class LikelyCE" in block))
    (line,) = (block.rstrip("\n") for block in blocks("yaml") if "mine.LikelyCE" in block)
    quickstart = (ROOT / "experiments/quickstart.yaml").read_text()
    changed = re.sub(r"^  losses: .*$", line, quickstart, flags=re.MULTILINE)
    assert changed != quickstart
    (tmp_path / "mine.yaml").write_text(changed.replace("common/", f"{ROOT}/experiments/common/"))
    yield tmp_path / "mine.yaml"
    sys.modules.pop("mine", None)


def on_tiny(tiny: TinyLab, folder: Path) -> list[str]:
    """The quickstart's keys that say how large it is."""
    keys = {"target.model": tiny.target, "target.dtype": "float64", "answers": "null", "data.path": tiny.data}
    keys |= {"data.max_length": 96, "data.row_length": 128, "model.draft_vocab": 64, "model.unroll.depth": 2}
    keys |= {"trainer.max_steps": 4, "trainer.val_check_interval": 2, "trainer.products": "float32"}
    keys |= {"evaluate.other_dtype": "null", "evaluate.max_new_tokens": 6, "evaluate.tasks.0.limit": 1}
    return [f"--{key}={value}" for key, value in (keys | {"tracking.folder": folder}).items()]


def test_a_new_term_is_named_by_its_import_path_and_computes_what_it_says(mine: Path) -> None:
    (term,) = load(str(mine)).model.losses
    teacher = type("Teacher", (), {"p": torch.tensor([[0.5, 0.495, 0.005]])})()
    value = term.per_row(torch.tensor([[0.5, 0.25, 0.25]]).log(), teacher)
    assert float(value) == pytest.approx(0.5 * 0.6931 + 0.495 * 1.3863, abs=1e-3)


def test_a_head_of_the_new_method_obeys_the_laws(mine: Path, tiny: TinyLab, tmp_path: Path) -> None:
    """Step 3."""
    experiment = load(str(mine), *(word.removeprefix("--") for word in on_tiny(tiny, tmp_path / "runs")))
    target = inputs.load_target(experiment)
    data = inputs.build_data(experiment, target)
    module = head_module.build_module(experiment, target, data).double()
    batch = next(iter(data.train_dataloader()))
    laws.every_parameter_learns(module, batch)
    length = int((batch.document[0] == 0).sum())
    one = Batch(*(part[:1, :length] for part in vars(batch).values()))
    taps = target.features(one, Needs(layers=module.source.layers(target.spec.layers))).taps
    laws.drafts_as_serially(module.unroll, module.draft, module.source(taps).detach(), one)
    proposer = Eagle(module.source, module.draft, Chain(3), target.spec.layers)
    laws.greedy_answers_are_vanillas(target, proposer, [batch.ids[0, :5].tolist()])


def test_a_new_method_is_trained_and_measured_beside_its_neighbour(
    mine: Path, tiny: TinyLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4."""
    tables = {}
    for name, yaml in (("mine", mine), ("quickstart", ROOT / "experiments/quickstart.yaml")):
        words = [*on_tiny(tiny, tmp_path / "runs"), f"--name={name}", f"--json={tmp_path / name}.json"]
        assert main(["fit", str(yaml), *words]) == 0, capsys.readouterr().err
        tables[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert [row["name"] for row in tables["mine"]["methods"]] == ["vanilla", "chain", "static", "dynamic"]
    assert len({row["tokens"] for table in tables.values() for row in table["methods"]}) == 1
    store = MlflowClient(store_uri(tmp_path / "runs"), store_uri(tmp_path / "runs"))
    params = [store.get_run(tables[name]["run_id"]).data.params for name in tables]
    assert {key.partition(".init_args")[0] for key in params[0] if params[0].get(key) != params[1].get(key)} == {
        "model.losses.0",
        "model.losses.0.floor",
    }


def test_the_evaluation_that_the_readme_shows_is_one(tmp_path: Path) -> None:
    from eagle3_lab.config import load
    from eagle3_lab.evaluation.runner import Evaluation

    (shown,) = (block for block in blocks("yaml") if block.startswith("evaluate:"))
    (tmp_path / "shown.yaml").write_text(re.sub(r"^  ", "", shown.partition("\n")[2], flags=re.MULTILINE))
    evaluation = load(str(tmp_path / "shown.yaml"), into=Evaluation)
    assert [task.name for task in evaluation.tasks] == ["mt_bench", "gsm8k", "mine"]
    assert {name: law.temperature for name, law in evaluation.by_law.items()} == {"T0": 0.0, "T1": 1.0}
    assert evaluation.methods["eagle"].levels == 8


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert (page.parent / link).exists(), link
    # a user's own module, what a run logs, and what every folder of ablations has
    for name in re.findall(r"`([\w./]+\.(?:md|py|yaml|ipynb))`", PAGES[page]):
        places = (ROOT / name, ROOT / "eagle3_lab" / name)
        assert name in ("mine.py", "config.yaml", "ablation.yaml") or any(place.is_file() for place in places), name
