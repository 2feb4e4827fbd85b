"""Signals that wait for what must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block: it starts processes, say, through a library that
    an exception in the middle would confuse.

    Not by a mask, since another thread takes what the main one does not; where this is not the main
    thread, whose handlers alone Python runs, there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
