"""Cells in processes of their own: what fails alone, what waits, what ends with whom. The processes are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ablation_toys import Toy

from eagle3_lab.ablation import ablate, schedule
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.ablation.schedule import Failure, Schedule, cell_command, failure, remember


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_cell_that_fails_is_shown_and_the_others_go_on(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ablation = toy.read()

    def command(ablation: Ablation, cell: Cell) -> list[str]:
        return python(f"open({str(tmp_path / cell.title)!r}, 'w'); raise SystemExit({int(cell.name == 'deep')})")

    running = Schedule(ablation, command=command)
    running.run(ablation.cells)
    assert running.failed == {"deep-0": "its process ended with status 1"}
    assert (tmp_path / "flat-0").exists()
    err = capsys.readouterr().err
    assert "cell deep-0: FAILED: its process ended with status 1" in err
    assert "ablation: 6/12 steps" in err or "ablation: 6 steps" in err
    deep, flat = ablation.cells
    assert failure(ablation, deep) == Failure("its process ended with status 1") and failure(ablation, flat) is None
    toy.change("depth: 2", "depth: 3")
    assert failure(toy.read(), toy.read().cells[0]) is None, "another configuration has not failed"


def test_a_failed_cell_is_left_alone_until_it_is_asked_for(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation = toy.read()
    for cell in ablation.cells:
        remember(ablation, cell, Failure("no room"))
    ran = toy.run("ablate")
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == "depth: 2 of 2 cells failed (deep-0, flat-0); --retry-failed runs them again"
    assert "failed: no room" in ran.out
    monkeypatch.setattr(Schedule, "run", lambda self, cells: None)
    assert toy.run("ablate", "--retry-failed").code == 0


def test_all_cells_with_one_seed_run_before_the_next_seed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.change("cells:", "seeds: [1, 0]\ncells:")
    order: list[str] = []
    monkeypatch.setattr(Schedule, "run", lambda self, cells: order.extend(cell.title for cell in cells))
    monkeypatch.setattr(ablate, "run_cell", lambda ablation, cell: None)
    toy.run("ablate")
    assert order == ["deep-1", "flat-1", "deep-0", "flat-0"]


def test_several_run_at_a_time_with_logs_of_their_own(toy: Toy, tmp_path: Path) -> None:
    ablation = toy.read()

    def command(ablation: Ablation, cell: Cell) -> list[str]:  # each waits for the other
        mine, other = (tmp_path / name for name in (("a", "b") if cell.name == "deep" else ("b", "a")))
        begin = f"import time; from pathlib import Path; Path({str(mine)!r}).touch()"
        return python(f"{begin}\nwhile not Path({str(other)!r}).exists(): time.sleep(0.01)\nprint('done')")

    running = Schedule(ablation, jobs=2, command=command)
    running.run(ablation.cells)
    assert not running.failed
    log = schedule.failure_file(ablation, ablation.cells[0]).with_name("deep-0.log")
    assert log.read_text() == "done\n"


def test_a_cell_that_another_process_trains_is_waited_for(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation = toy.read()
    monkeypatch.setattr(schedule, "BUSY_S", 0.0)
    tries = tmp_path / "tries"

    def command(ablation: Ablation, cell: Cell) -> list[str]:
        first = not tries.exists()
        tries.touch()
        if first:
            remember(ablation, cell, Failure("is being trained by another process", busy=True))
        return python(f"raise SystemExit({2 if first else 0})")

    running = Schedule(ablation, command=command)
    running.run(ablation.cells[:1])
    assert tries.exists() and not running.failed


def test_a_cell_ends_with_the_process_that_started_it() -> None:
    text = (
        "import time, eagle3_lab.ablation.schedule as s; s.end_with_starter(); print('up', flush=True); time.sleep(99)"
    )
    cell = subprocess.Popen(
        python(text), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {schedule.STARTED: "1"}
    )
    assert cell.stdout is not None and cell.stdin is not None
    assert cell.stdout.readline() == b"up\n"
    time.sleep(0.1)
    assert cell.poll() is None
    cell.stdin.close()
    assert cell.wait(timeout=20) == -signal.SIGTERM
    cell.stdout.close()


def test_a_cells_command_repeats_the_overrides(toy: Toy) -> None:
    from eagle3_lab.ablation.plan import read_ablation

    ablation = read_ablation(toy.folder, [("trainer.max_steps", "3")])
    command = cell_command(ablation, ablation.cells[1])
    assert command[1:] == ["-m", "eagle3_lab", "ablate", str(toy.folder), "--cell", "flat-0", "--trainer.max_steps=3"]
