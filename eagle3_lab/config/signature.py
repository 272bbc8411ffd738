"""A verb's signature, read from its source: the module that does the verb's work, which takes seconds to import, waits.

A command line is then checked, and its help printed, with what the signature itself names.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def signature_of(module: str, function: str) -> Callable[..., Any]:
    """Return a function of this name, parameters, docstring and attributes that does nothing.

    Only what its annotations and defaults name is imported. Where one of them is no import of the module, such as a
    class of its own, the module is imported and its function returned.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is a module of Python"
    body = ast.parse(Path(spec.origin).read_text("utf-8")).body
    (definition,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    names = {node.id for node in ast.walk(definition.args) if isinstance(node, ast.Name)} - vars(builtins).keys()
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom) and names & _bound(node)]
    if names - set().union(*map(_bound, imports)):
        return vars(importlib.import_module(module))[function]
    definition.returns = None
    definition.body = [ast.Expr(ast.Constant(ast.get_docstring(definition, clean=False) or ""))]
    attributes = [node for node in body if isinstance(node, ast.Assign) and _owner(node.targets[0]) == function]
    source = "from __future__ import annotations\n" + ast.unparse(ast.Module([*imports, definition, *attributes], []))
    namespace: dict[str, Any] = {"__name__": "__main__"}  # jsonargparse asks the packages of a function's module for it
    exec(compile(source, f"<signature of {function}>", "exec"), namespace)  # noqa: S102 - lines of our own module
    found = namespace[function]
    found.__annotations__ = typing.get_type_hints(found)
    return found


def _bound(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The names that an import statement binds."""
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _owner(target: ast.expr) -> str:
    """`f` of `f.attribute`; "" for anything else."""
    return target.value.id if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) else ""
