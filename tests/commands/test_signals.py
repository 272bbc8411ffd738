"""Verbs that are ended by SIGTERM, each in a process of its own: one line, and nothing that looks as if it went on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tiny_runs import Bench

import eagle3_lab
from eagle3_lab.tracking.run import store_uri

WAIT = 300  # seconds, on a machine that is busy with other things
LOOKUP = "{lookup: PromptLookup}"
HEADLESS = ("--model", "null", "--evaluate.methods", LOOKUP)
LAW = "{class_path: SamplingLaw, init_args: {temperature: 1.0}}"
LAWS = "{" + ", ".join(f"law {i}: {LAW}" for i in range(60)) + "}"


def start(bench: Bench, verb: str, *words: str) -> subprocess.Popen[str]:
    """The command line as a user gives it."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3_lab", *verb.split(), str(bench.yaml), *words],
        cwd=Path(eagle3_lab.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def terminated(process: subprocess.Popen[str]) -> list[str]:
    """What it said on stderr when it was told to end."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    return err.splitlines()


@pytest.mark.slow
def test_a_terminated_evaluation_is_killed_in_the_store_and_goes_on(bench: Bench) -> None:
    process = start(bench, "evaluate", *HEADLESS, "--evaluate.laws", LAWS)
    deadline = time.monotonic() + WAIT
    while not any(path.read_text().count("\n") > 2 for path in bench.folder.glob("work/*-answers-*.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.005)
    *_, stopped, last = terminated(process)
    assert last == "terminated"
    assert stopped.startswith("evaluation: stopped at ")
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "KILLED"
    (journal,) = bench.folder.glob("work/*-answers-*.jsonl")
    assert journal.read_text().endswith("\n"), "what was answered is kept for the next process"


@pytest.mark.slow
def test_a_terminated_chat_says_so_in_one_line(bench: Bench) -> None:
    process = start(bench, "generate", *HEADLESS, "--max-new-tokens", "4")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.readline()  # the answer; now it waits for the next line
    time.sleep(0.5)
    assert terminated(process)[-1] == "terminated"
