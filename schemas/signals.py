"""SIGINT and SIGTERM: they stop a command, but not in the middle of what must not be half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from dspark.schemas.errors import StoppedError

STOPPING = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> None:
    """From now on both raise StoppedError, wherever the main thread is."""
    for number in STOPPING:
        signal.signal(number, _stop)


def _stop(number: int, _: object) -> None:
    raise StoppedError(number)


@contextmanager
def signals_held() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block: it starts processes, say, through a library that
    an exception in the middle would confuse.

    Processes that are started meanwhile get neither, until they call ``leave_to_parent``. A mask
    alone would not do: another thread takes what the main one does not. Where this is not the main
    thread, whose handlers alone Python runs, or where handlers are not Python's, nothing is held.
    """
    not_ours = None in map(signal.getsignal, STOPPING)
    if not_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if came:
            signal.raise_signal(came[0])


def leave_to_parent(*numbers: Signals) -> None:
    """In a process that was started while signals were held: ignore some, and get the others."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
