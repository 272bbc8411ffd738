"""Mistakes of a user: what they are called, and how a wrong word is answered.

Everything that a user can do wrong, in a file, on the command line or with a missing checkpoint, is a
`UserError` whose text is one line. The command line prints that line and nothing else; a notebook sees the
exception. Anything else that is raised is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A user's mistake. `str(error)` is the one line to print: where, which key, which value, what is right."""


class ConfigError(UserError):
    """A mistake in an experiment: its files, its overrides, or a value that a part refuses."""


def near(word: str, names: Iterable[str], *, otherwise: str = "legal") -> str:
    """Return the end of a message about a wrong `word`: the nearest of the legal names, or all of them.

    The text starts with its own separator, so that it can be appended to any message; it is empty if there is no
    name. `otherwise` is the word before the list; with `otherwise=""` nothing is listed.

    >>> near("dept", ["depth", "detach"])
    "; did you mean 'depth'?"
    >>> near("zzz", ["depth", "detach"])
    '; legal: depth, detach'
    """
    names = sorted(set(names))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not names or not otherwise:
        return ""
    return f"; {otherwise}: {', '.join(name if name.isprintable() else repr(name) for name in names)}"
