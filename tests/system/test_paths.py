"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_lab import load
from eagle3_lab.errors import UserError
from eagle3_lab.pipeline.find_head import start_head
from eagle3_lab.system.files import bytes_text, is_file, is_folder, local_path
from eagle3_lab.target_model.embedded import embedded_target
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.run import Tracking
from eagle3_lab.training.checkpoint import content_hash

LONG = "x" * 300


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LONG, "File name too long"),
        (f"{LONG}/a", "File name too long"),
        ("~nobody-of-this-name/a", "home directory"),
        ("a\0b", "a null character"),
    ],
)
def test_what_can_be_no_path_is_told_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"is no path here \(.*{why}.*\); write one that can be opened$"):
        local_path(text)
    with pytest.raises(UserError, match=r"^tracking\.folder: .* is no path here"):
        Tracking(Path(text))
    assert not is_file(Path(text)) and not is_folder(Path(text))
    with pytest.raises(UserError, match=r"^checkpoint: no file "):
        content_hash(Path(text))


def test_a_home_is_resolved_in_the_folder_of_runs_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/a") == Tracking(Path("~/a")).folder == tmp_path / "a"
    assert local_path("a") == Tracking(Path("a")).folder == Path("a"), "others stay as they are"


def test_a_beginning_may_lie_in_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "draft.ckpt").write_bytes(b"read later")
    target = object.__new__(HFTarget)  # a checkpoint's place needs none
    experiment = load("experiments/hass_stage2.yaml", "model.start=~/draft.ckpt")
    place = start_head(experiment, target)
    assert place is not None and place.path == tmp_path / "draft.ckpt"
    experiment = load("experiments/hass_stage2.yaml", "model.start=~nobody-of-this-name/draft.ckpt")
    with pytest.raises(
        UserError, match=r"^command line: model\.start: ~nobody-of-this-name/draft\.ckpt: is no path here"
    ):
        start_head(experiment, target)


def test_a_wheel_may_lie_in_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wrong.whl").write_bytes(b"not a wheel")
    with pytest.raises(UserError, match=rf"^{tmp_path}/wrong\.whl: sha256 is "):
        embedded_target(Path("~/wrong.whl"))


def test_bytes_are_told_in_a_unit_of_their_size() -> None:
    told = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_999: "1.0 MB", 1_234_567: "1.2 MB", 10**11: "100.0 GB"}
    assert {count: bytes_text(count) for count in told} == told
    assert bytes_text(5 * 10**18) == "5000.0 PB"
