"""Chat templates by name: a Jinja file of the user's, or one of the package's."""

from __future__ import annotations

from importlib import resources

from eagle3_lab.errors import UserError, near
from eagle3_lab.system.files import local_path

PACKAGED = "package:"


def read_template(name: str) -> str:
    """The text of a template: ``package:vicuna``, ``package:llama3_eagle``, ``package:deepseek_r1``, or a Jinja file.

    Raises:
        UserError: no such file or name, or a file that cannot be read as text.
    """
    if name.startswith(PACKAGED):
        folder = resources.files("eagle3_lab") / "resources" / "templates"
        there = {f"{PACKAGED}{entry.name.removesuffix('.jinja')}": entry for entry in folder.iterdir()}
        if name not in there:
            raise UserError(f"target.chat_template: unknown name {name!r}{near(name, there)}")
        return there[name].read_text(encoding="utf-8")
    path = local_path(name)
    if not path.is_file():
        raise UserError(f"target.chat_template: no file {name}; a Jinja file, or {PACKAGED} and a name")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"target.chat_template: {name} cannot be read ({said}); a Jinja file is needed") from None
