"""SIGINT and SIGTERM come after what must not be left half done."""

import signal
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
    done = False
    with pytest.raises(ToldError, match=str(int(signal.SIGTERM))), signals_held():
        for number in (signal.SIGTERM, signal.SIGINT):
            if by_another_thread:
                thread = threading.Thread(target=signal.raise_signal, args=(number,))
                thread.start()
                thread.join()
            else:
                signal.raise_signal(number)
        done = True
    assert done
    assert {signal.getsignal(number) for number in STOPPING} == {tell}


@pytest.mark.usefixtures("handlers")
def test_an_error_of_the_block_is_raised_and_the_handlers_are_there_again() -> None:
    with pytest.raises(KeyError), signals_held():
        raise KeyError
    with pytest.raises(ToldError):
        signal.raise_signal(signal.SIGINT)


def test_another_thread_has_nothing_to_hold() -> None:
    def in_thread() -> object:
        with signals_held():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_thread).result() is signal.getsignal(signal.SIGINT)
