"""Arrays of one size, asked for again and again, come from memory that is there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from eagle3_lab.system.malloc import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def step():
    held = [torch.ones(2**18) for _ in range(100)]  # 1 MiB each
    return sum(float(x[0]) for x in held)

for _ in range(30):  # until the heap has found its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_step_again_asks_the_system_for_hardly_a_page() -> None:
    faults, mapping = {}, {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what else it does depends on all that came before
    for how in ("kept", "plain"):
        command, env = [sys.executable, "-c", PROGRAM, how], os.environ | mapping
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        faults[how] = int(ran.stdout)
    assert faults["kept"] < 1000, faults
    assert faults["plain"] > faults["kept"] + 10000, faults


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3_lab.system import malloc

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(malloc.ctypes, "CDLL", None)  # to call it would be an error
    assert not malloc.keep_freed_memory()
