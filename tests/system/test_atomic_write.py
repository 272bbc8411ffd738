"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from eagle3_lab.system.files import write_atomic


def test_a_write_that_fails_midway_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "file"
    write_atomic(place, b"before")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        write_atomic(place, b"x" * 5000)
    assert place.read_bytes() == b"before"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    write_atomic(place, b"after")
    assert place.read_bytes() == b"after"
