"""A prepared file of conversations and the manifest beside it: what their lines are, and what is counted of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_lab.data.conversations import Report
from eagle3_lab.data.generation.dialogue import Dialogue
from eagle3_lab.data.sources.prompts import NOT_STATED, Talk
from eagle3_lab.data.turns import Tools
from eagle3_lab.errors import UserError
from eagle3_lab.system.files import write_atomic


def answered(dialogues: Sequence[Dialogue], temperature: float, split: str) -> list[dict[str, Any]]:
    """The lines of those conversations of which anything was answered."""
    return [
        {
            "id": one.id,
            "source": one.source,
            "split": split,
            "temperature": temperature,
            "cut": one.said[-1].cut,
            "looping": any(said.looping for said in one.said),
            "exact": all(said.exact for said in one.said),
            "answer_tokens": sum(said.tokens for said in one.said),
            "messages": one.messages,
        }
        | _with_tools(one.tools)
        for one in dialogues
        if one.said
    ]


def as_they_stand(talks: Sequence[Talk], dialogues: Sequence[Dialogue]) -> list[dict[str, Any]]:
    """The lines of the sources' own answers. How those were drawn nobody says."""
    chosen = [talks[one.number] for one in dialogues]
    return [
        {"id": one.id, "source": one.source, "split": "train", "messages": list(one.messages)} | _with_tools(one.tools)
        for one in chosen
    ]


def _with_tools(tools: Tools) -> dict[str, Any]:
    return {"tools": list(tools)} if tools else {}


def stages_of(file: Path) -> list[Report]:
    """What became of the raw file's conversations before they were this file's lines, as its manifest counts it.

    Raises:
        UserError: a damaged manifest.
    """
    stages = read_manifest(file).get("stages", [])
    try:
        return [Report.of(one) for one in stages]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{manifest_of(file)}: 'stages' is no list of counts; prepare {file.name} anew") from None


def tallies(records: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    """What a manifest counts. ``text``: the file's."""
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "conversations": len(records),
        "by_source": dict(sorted(Counter(record["source"] for record in records).items())),
        "by_split": dict(sorted(Counter(record["split"] for record in records).items())),
        "answer_tokens": sum(record.get("answer_tokens", 0) for record in records),
        "cut": sum(record.get("cut", False) for record in records),
        "looping": sum(record.get("looping", False) for record in records),
        "not_exact": sum(not record.get("exact", True) for record in records),  # the text reads back as other ids
    }


def manifest_of(file: Path) -> Path:
    """Where the manifest of a prepared file lies."""
    return file.with_name(f"{file.name.partition('.jsonl')[0]}.manifest.json")


def licences_of(file: Path) -> dict[str, str]:
    """The terms of a file's texts by source, as its manifest has them; "not stated" where it has none."""
    said = read_manifest(file)
    named = said.get("licences")
    if isinstance(named, dict) and named:
        return {str(name): str(terms) for name, terms in named.items()}
    return {file.name: str(said.get("licence", NOT_STATED))}


def read_manifest(file: Path) -> dict[str, Any]:
    """What stands in a file's manifest; nothing where there is none. Raises UserError for one that is damaged."""
    place = manifest_of(file)
    if not place.is_file():
        return {}
    try:
        said = json.loads(place.read_text("utf-8"))
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise UserError(f"{place}: is no manifest (a JSON object); remove it, or prepare {file.name} anew")
    return said


def require_whole(file: Path) -> None:
    """Refuse a prepared file that is not the one its manifest describes. Raises UserError."""
    said = read_manifest(file).get("sha256")
    if said != hashlib.sha256(file.read_bytes()).hexdigest():
        raise UserError(
            f"{file}: is not what {manifest_of(file).name} beside it describes; remove it, and it is prepared anew"
        )


def put(place: Path, text: str) -> None:
    """Write a file whole or not at all. Raises UserError where that cannot be written."""
    try:
        write_atomic(place, text.encode())
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({error.strerror}); free space, or set EAGLE3_LAB_CACHE") from None
