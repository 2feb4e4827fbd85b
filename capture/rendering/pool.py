"""Rendering rows and batches in processes of their own, so that the target need not wait for it."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from signal import Signals
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dspark.capture.conversations import Conversations
from dspark.capture.rendering.batch_inputs import BatchInputs, batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.settings import RowOptions
from dspark.capture.targets.processor import EncodesRows
from dspark.schemas.cores import usable_cores
from dspark.schemas.errors import InputError
from dspark.schemas.signals import STOPPING, leave_to_parent, signals_held

_MOST = 8
_PR_SET_PDEATHSIG = 1
_PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"

T = TypeVar("T")

_source: tuple[Conversations, EncodesRows]
"""What a rendering process renders."""


def default_workers() -> int:
    """Rendering processes by default: the cores of this process, less one for the target."""
    return min(_MOST, usable_cores() - 1) if sys.platform == "linux" else 0


class RenderingPool:
    """Renders rows and batches, in the order in which results are asked for.

    Use as a context manager. Its processes are forked when that is entered, and never again: before
    there are locks, threads or devices that a child must not share. They live no longer than this
    process.

    Args:
        workers: processes; with 0, this process renders when a result is asked for.
        conversations: the dataset, which is only read by row.
        target: what renders them.

    Attributes:
        ahead: batches to hand out before the first result is asked for.
    """

    def __init__(self, workers: int, conversations: Conversations, target: EncodesRows) -> None:
        self.ahead = 1 + workers
        self._workers = workers
        self._source = conversations, target
        self._executor: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._workers:
            before, threads = {*multiprocessing.active_children()}, {*threading.enumerate()}
            self._executor = ProcessPoolExecutor(
                self._workers,
                multiprocessing.get_context("fork"),
                _begin,
                (os.getpid(), *self._source),
            )
            try:
                with _ready_to_fork():
                    try:
                        self._executor.submit(os.getpid)  # forks all of them
                    finally:
                        self._processes = [*({*multiprocessing.active_children()} - before)]
                        self._threads = [*({*threading.enumerate()} - threads)]
            except BaseException:  # a signal that was held meanwhile, say
                self._end()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            for process in self._processes:  # whatever they do, nobody waits for it
                process.kill()
            # Python wakes the executor's own thread when it ends, and fails if that just closes.
            for thread in self._threads:
                if thread.is_alive():  # the one that fills its queue may be about to start
                    thread.join(timeout=10)

    def encode(
        self, samples: Sequence[int], max_length: int, options: RowOptions
    ) -> Callable[[], list[EncodedRow | SkippedRow]]:
        """Hand out some dataset rows; what comes back gives their encodings, when they are there.

        It raises what ``encode_row`` raises, and InputError if a rendering process has died.
        """
        if self._executor is None:
            return lambda: _encode(self._source, samples, max_length, options)
        return self._submit(_encode_here, samples, max_length, options)

    def batch(
        self, rows: Sequence[EncodedRow], *, fake_image: bool
    ) -> Callable[[], list[BatchInputs]]:
        """Hand out a batch; likewise, see ``batch_inputs``."""
        if self._executor is None:
            return lambda: [*batch_inputs(rows, *self._source, fake_image=fake_image)]
        made = self._submit(_batch_here, rows, fake_image)
        return lambda: [
            BatchInputs(of, {k: _tensors(v) for k, v in arrays.items()}) for of, arrays in made()
        ]

    def _submit(self, function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
        assert self._executor is not None
        with self._telling_of_death():
            future = self._executor.submit(function, *arguments)

        def result() -> T:
            with self._telling_of_death():
                return future.result()

        return result

    @contextmanager
    def _telling_of_death(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            raise InputError(
                f"a process that renders rows has died{self._how()}; what is committed stays: give "
                "the same command again, with a smaller --num-workers if memory was short"
            ) from None

    def _how(self) -> str:
        """In words, the signal that ended a process."""
        ended = wait([process.sentinel for process in self._processes], timeout=1)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(timeout=1)
                if (code := process.exitcode) is not None and code < 0:
                    return f" (killed by {Signals(-code).name})"
        return ""


def _begin(parent: int, conversations: Conversations, target: EncodesRows) -> None:
    """Make a forked process one that renders."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            os._exit(1)
    leave_to_parent(*STOPPING)  # which ends its children itself
    torch.set_num_threads(1)
    global _source
    _source = conversations, target


def _encode_here(
    samples: Sequence[int], max_length: int, options: RowOptions
) -> list[EncodedRow | SkippedRow]:
    return _encode(_source, samples, max_length, options)


def _encode(
    source: tuple[Conversations, EncodesRows],
    samples: Sequence[int],
    max_length: int,
    options: RowOptions,
) -> list[EncodedRow | SkippedRow]:
    return [encode_row(sample, *source, max_length, options) for sample in samples]


def _batch_here(
    rows: Sequence[EncodedRow], fake_image: bool
) -> list[tuple[list[EncodedRow], dict[str, Any]]]:
    made = batch_inputs(rows, *_source, fake_image=fake_image)
    return [(of.rows, {k: _arrays(v) for k, v in of.tensors.items()}) for of in made]


def _arrays(value: Any) -> Any:
    """Nested tensors as arrays, which go through a pipe; tensors would take shared memory, of
    which containers have little."""
    if isinstance(value, Tensor) and value.dtype != torch.bfloat16:
        return value.numpy()
    if isinstance(value, list | tuple):
        return type(value)(_arrays(v) for v in value)
    return value


def _tensors(value: Any) -> Any:
    """What ``_arrays`` was given."""
    if isinstance(value, list | tuple):
        return type(value)(_tensors(v) for v in value)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@contextmanager
def _ready_to_fork() -> Iterator[None]:
    """Around a fork: no signal meets a child that is not ready for it, and the tokenizers library,
    which warns of forks, is told how to go on."""
    before = os.environ.get(_PARALLEL_TOKENIZERS)
    os.environ[_PARALLEL_TOKENIZERS] = before or "false"
    try:
        with signals_held():
            yield
    finally:
        if before is None:
            del os.environ[_PARALLEL_TOKENIZERS]
