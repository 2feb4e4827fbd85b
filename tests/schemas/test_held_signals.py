"""SIGINT and SIGTERM come after what must not be left half done."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dspark.schemas.signals import STOPPING, signals_held


class ToldError(Exception):
    pass


def tell(number: int, _: object) -> None:
    raise ToldError(number)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, tell) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("by_another_thread", [False, True])
def test_they_wait_for_the_end_of_the_block(by_another_thread: bool) -> None:
    held, done = threading.Event(), False

    def send() -> None:
        assert held.wait(timeout=60)
        signal.raise_signal(signal.SIGTERM)

    # Started before the block, it takes what the main thread does not.
    with ThreadPoolExecutor(1) as pool, pytest.raises(ToldError, match=r"^15$"):
        sent = pool.submit(send) if by_another_thread else None
        with signals_held():
            held.set()
            sent.result() if sent else send()
            done = True
    assert done
    assert {signal.getsignal(number) for number in STOPPING} == {tell}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOPPING}


@pytest.mark.usefixtures("handlers")
def test_an_error_of_the_block_is_raised_and_the_handlers_are_there_again() -> None:
    with pytest.raises(KeyError), signals_held():
        raise KeyError
    with pytest.raises(ToldError):
        signal.raise_signal(signal.SIGINT)


def test_a_process_that_is_started_meanwhile_gets_them_when_it_is_ready() -> None:
    program = (
        "import signal, sys\n"
        "from dspark.schemas.signals import leave_to_parent\n"
        "signal.raise_signal(signal.SIGTERM); signal.raise_signal(signal.SIGINT)\n"
        "print('still here', flush=True)\n"
        "leave_to_parent(signal.SIGINT)\n"
        "print('still here, too')"
    )
    with signals_held():
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGTERM, b"still here\n")


def test_another_thread_has_nothing_to_hold() -> None:
    def in_thread() -> object:
        with signals_held():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_thread).result() is signal.getsignal(signal.SIGINT)
