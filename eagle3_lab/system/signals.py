"""SIGTERM, as a batch system or `timeout` sends it, ends a verb as Ctrl-C does: what is open is closed."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AT_ONCE = 1.0  # seconds within which a second signal is the first one's echo


class Terminated(KeyboardInterrupt):
    """The process was told to end."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within, SIGTERM raises :class:`Terminated` in the main thread. Whoever has said otherwise keeps the signal: a
    caller before, such as a notebook's, and a training within. Elsewhere than in the main thread nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    told = -math.inf

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        now = time.monotonic()
        is_echo = now - told < AT_ONCE  # `timeout` tells the process, and then its group
        told = now
        if not is_echo:
            raise Terminated

    signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
