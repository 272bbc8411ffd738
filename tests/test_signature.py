"""A command line's mistakes and its help come before what the work imports."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from eagle3_lab.__main__ import VERBS
from eagle3_lab.config import signature_of

HEAVY = ("lightning", "transformers", "torchmetrics", "mlflow", "datasets", "matplotlib", "sklearn", "pandas", "scipy")
LINES = [
    (["fit", "--help"], 0),
    (["fit", "quickstart.yaml", "--modl.x", "1"], 2),
    (["fit", "quickstart.yaml", "--sede", "1"], 2),
    (["fit", "quickstart.yaml", "--model.unroll.dept", "1"], 2),
    (["fit", "quickstart.yaml", "--data.pth", "x"], 2),
    (["fit", "quickstart.yaml", "--evaluate.methods.static.grow", "McSim7b36"], 2),
    (["evaluate", "evaluate/no_head.yaml", "--print_config"], 0),
]
CODE = """\
import json, sys
from eagle3_lab.__main__ import main
found = []
for words in json.loads(sys.argv[1]):
    status = main(words)
    found.append([status, [name for name in json.loads(sys.argv[2]) if name in sys.modules]])
print("FOUND", json.dumps(found))
"""


def test_help_and_mistakes_import_nothing_of_what_the_work_needs() -> None:
    words = [json.dumps([line for line, _ in LINES]), json.dumps(HEAVY)]
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found == [[status, []] for _, status in LINES], done.stderr
    assert done.stderr.count("\n") == sum(status == 2 for _, status in LINES)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_signature_is_the_functions_own(verb: str) -> None:
    module, name, _ = VERBS[verb]
    real, read = vars(importlib.import_module(module))[name], signature_of(module, name)
    assert read is not real and read.__name__ == name
    hints = typing.get_type_hints(real)
    hints.pop("return", None)
    assert typing.get_type_hints(read) == hints
    ours, theirs = (inspect.signature(function).parameters.values() for function in (read, real))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    assert inspect.getdoc(read) == inspect.getdoc(real)
    assert vars(read).get("positional") == vars(real).get("positional")


def test_a_verb_of_a_class_of_its_own_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_verb.py").write_text(
        "class Own: ...\n\ndef run(experiment: Own, *, count: int = 1) -> None:\n    raise RuntimeError\n"
    )
    read = signature_of("own_verb", "run")
    assert read is sys.modules["own_verb"].run
