"""Who may import whom: the rooms of the package, from the floor up.

    python tests/test_import_rules.py    draws the graph: each room, its floor, and the rooms that it imports

A room is a folder or a module directly below ``eagle3_lab``. An import within a function counts as any other.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "eagle3_lab"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "types", "seeds", "resources", "eagle3_lab"),
    ("backend", "kv_cache", "rows", "system"),
    ("config", "interfaces", "tracking"),
    ("draft", "target_model"),
    ("decode", "formats"),
    ("data",),
    ("engine", "evaluation"),
    ("training",),
    ("experiment",),
    ("pipeline",),
    ("bench", "commands"),
    ("ablation",),
    ("__main__",),
)
"""Rooms by floor: a room imports rooms of lower floors alone."""

OUTSIDE = {
    "transformers": ("target_model", "data.chat", "bench"),
    "mlflow": ("tracking",),
}
"""Libraries that belong to some places: to rooms, or to single modules."""

CORE = ("decode.loop", "decode.verify", "draft.unroll", "training.loss.unrolled")
"""Modules that know no method: what is different about a method is in its own class."""

ASKED = {"Tensor", "tuple", "CausalDraft", "RowTerm", "StepTerm", "FeatureTerm"}
"""What the core may ask by ``isinstance``: interfaces and plain types, no method's class."""

METHODS = (
    "draft.eagle1",
    "draft.eagle3",
    "draft.hydra",
    "draft.medusa",
    "draft.draft_lm",
    "draft.attention.hass",
    "decode.methods",
    "decode.propose",
    "decode.typical",
    "training.loss.lk",
)


def short(module: str) -> str:
    """Without the package's name, which stands for its own ``__init__``."""
    return module.partition(".")[2] or PACKAGE


def room(module: str) -> str:
    return module.partition(".")[0]


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below it."""
    found = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))] = ast.parse(file.read_text())
    return found


MODULES = modules()


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names that a module imports, of modules or of what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run(tree: ast.Module) -> Iterator[str]:
    """What is imported when the module runs: without what is imported for type checkers alone."""
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    yield from imports(ast.Module([node for node in tree.body if node not in for_types], []))


def arrows() -> dict[str, set[str]]:
    """For each module of the package the others of it that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in MODULES.items():
        for full in imports(tree):
            if full.split(".")[0] == PACKAGE:
                module, parent = short(full), short(full.rpartition(".")[0])
                found[name].add(module if module in MODULES else parent)
        found[name] -= {name, PACKAGE}
    return found


ARROWS = arrows()


def between_rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in ARROWS.items():
        found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them; none where the graph has no circle."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        done.add(name)
        return next((found for other in sorted(graph.get(name, ())) if (found := walk(other, [*path, name]))), [])

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_a_circle_is_found_where_there_is_one() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_every_room_has_its_floor() -> None:
    assert sorted({room(module) for module in MODULES}) == sorted(name for floor in FLOORS for name in floor)


def test_a_room_imports_lower_floors_alone() -> None:
    height = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{module} imports {other}"
        for module, others in ARROWS.items()
        for other in others
        if room(module) != room(other) and height[room(module)] <= height[room(other)]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(ARROWS) == []


@pytest.mark.parametrize("name", ["draft", "decode", "data"])
def test_parts_know_the_interface_and_not_the_concrete_target(name: str) -> None:
    wrong = {
        f"{module} imports {other}"
        for module, others in ARROWS.items()
        for other in others
        if room(module) == name and room(other) == "target_model"
    }
    loads_a_draft_model = {
        "decode.methods imports target_model.hf_target",
        "decode.methods imports target_model.loading",
    }
    assert wrong <= loads_a_draft_model


@pytest.mark.parametrize("library", OUTSIDE)
def test_a_library_is_imported_where_it_belongs(library: str) -> None:
    users = {name for name, tree in MODULES.items() if any(full.split(".")[0] == library for full in run(tree))}
    allowed = OUTSIDE[library]
    assert users
    assert not {name for name in users if not (f"{name}.").startswith(tuple(f"{place}." for place in allowed))}


@pytest.mark.parametrize("name", CORE)
def test_the_core_names_no_method(name: str) -> None:
    assert not {other for other in ARROWS[name] if f"{other}.".startswith(tuple(f"{one}." for one in METHODS))}


@pytest.mark.parametrize("name", CORE)
def test_the_core_asks_for_no_methods_class(name: str) -> None:
    asked = {
        ast.unparse(kind)
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for kind in (node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]])
    }
    assert asked <= ASKED


def draw() -> str:
    """The graph as text, from the lowest floor up."""
    rooms = between_rooms()
    lines = [f"{len({room(m) for m in MODULES})} rooms, {sum(map(len, rooms.values()))} arrows"]
    for i, floor in enumerate(FLOORS):
        lines += [f"{i:2}  {name:<13} {' '.join(sorted(rooms.get(name, ())))}".rstrip() for name in floor]
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw())
