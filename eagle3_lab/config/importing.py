"""Imports that a YAML asks for: of the packages that can have a class for the slot, and of the user's own modules.

A name in a YAML never imports anything else: an import runs a module's code, and what it yields might be called. The
standard library and other installed packages are refused by name, before anything of them is imported. jsonargparse
follows the same rule through its own setting (`import_path_allowlist`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from eagle3_lab.errors import near

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages. A module elsewhere is the user's own, an editable installation included."""


class NoPartError(LookupError):
    """A name in YAML is no class that may stand there. Its text is the end of a message, with the nearest name."""


def import_path(path: str, bases: tuple[type, ...]) -> object:
    """Return what a dotted path names, for a slot that takes a class below ``bases``.

    Raises: `NoPartError` for a path that is malformed or leads nowhere, for a module that may not be imported, and for
    whatever is wrong in a user's module.
    """
    if not all(name.isidentifier() for name in path.split(".")):
        raise NoPartError(f"{path!r} is no path of a class; write module.Class")
    _require_own(path, {base.__module__.partition(".")[0] for base in bases} | {"eagle3_lab"})
    module, _, rest = path.rpartition(".")
    names = [rest]
    while module:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # the module itself (or a class taken for one): try one step up; a module that it imports: tell that
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise NoPartError(f"{path!r} cannot be imported: {error}") from None
            module, _, last = module.rpartition(".")
            names.insert(0, last)
            continue
        except Exception as error:  # noqa: BLE001 - a user's own module, whatever is wrong in it
            raise NoPartError(f"{path!r} cannot be imported: {_fault(error, module)}") from None
        for name in names:
            if name not in dir(found):
                raise NoPartError(f"{path!r}: {found.__name__} has no {name}{near(name, dir(found), otherwise='')}")
            found = getattr(found, name)
        return found
    raise NoPartError(f"{path!r} cannot be imported: no module {path.partition('.')[0]}")


def allow(*paths: str) -> None:
    """Let jsonargparse import from the packages of these dotted paths, which have been checked or come from code; never
    from the standard library."""
    packages = {path.partition(".")[0] for path in paths} - sys.stdlib_module_names
    if packages:
        set_parsing_settings(import_path_allowlist=sorted(packages))


def _require_own(path: str, packages: set[str]) -> None:
    """Raises `NoPartError` for a path outside of ``packages`` and of the user's modules."""
    package = path.partition(".")[0]
    if package not in packages and (package in sys.stdlib_module_names or _is_installed(package)):
        own = ", ".join(sorted(packages))
        raise NoPartError(f"{path!r} is not imported; name a class of {own} or of a module of your own")


def _is_installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)  # imports nothing, for a name without a dot
    except ValueError:  # a module without a spec, such as a notebook's __main__
        return False
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return any(part in INSTALLED for place in places for part in Path(place).parts)


def _fault(error: Exception, module: str) -> str:
    """An error of a module that was being imported, with its last line outside of libraries' import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if len(frames) > 1 else f"{module}: "
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}: "
    message = str(error).splitlines()
    return f"{place}{type(error).__name__}{f': {message[0]}' if message else ''}"
