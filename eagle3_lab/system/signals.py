"""SIGTERM, as a batch system or `timeout` sends it, ends a verb as Ctrl-C does: files, runs and locks are closed."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AT_ONCE = 1.0  # seconds within which a second signal repeats the first one


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread at SIGTERM, within a ``with`` statement. A handler that is already
    installed, such as a notebook's, stays; outside the main thread nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    last_time = -math.inf

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        nonlocal last_time
        now = time.monotonic()
        is_repeated = now - last_time < AT_ONCE  # `timeout` signals the process, and then its group
        last_time = now
        if not is_repeated:
            raise Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
