"""What the package says of itself: declared dependencies, pins, and who may import what."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [Requirement(line) for line in PROJECT["dependencies"]]
TOOLS = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]


def imported(folder: str) -> Iterator[tuple[str, Path]]:
    """Top-level modules imported anywhere in a folder's Python files, and where."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                yield name.partition(".")[0], file.relative_to(ROOT)


def test_every_imported_package_is_declared() -> None:
    declared = {canonicalize_name(r.name) for r in DECLARED}
    distributions = packages_distributions()
    for module, file in imported("eagle3_lab"):
        if module in sys.stdlib_module_names or module == "eagle3_lab" or file.parent.name == "rivals":
            continue
        owners = {canonicalize_name(name) for name in distributions[module]}
        assert owners & declared, f"{file} imports {module}, which pyproject.toml does not declare"


def test_what_a_rivals_script_imports_is_pinned_for_its_own_environment() -> None:
    lines = (ROOT / "requirements" / "bench.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    found = {module for module, _ in imported("eagle3_lab/bench/rivals")} - set(sys.stdlib_module_names)
    assert "speculators" in found and found <= pinned, "and nothing of the lab, which is not installed there"


@pytest.mark.parametrize("requirement", DECLARED + TOOLS, ids=lambda r: r.name)
def test_the_pins_are_exact_and_within_what_is_declared(requirement: Requirement) -> None:
    lines = (ROOT / "requirements" / "quickstart.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    pinned = versions[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned), f"{requirement} does not allow the pinned {pinned}"
