"""Shards converted by several processes, which end with their parent, however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection

from dspark.convert.shard import Conversion, convert_shard
from dspark.schemas.errors import InputError
from dspark.schemas.signals import leave_to_parent, signals_held


def convert_shards(
    conversion: Conversion,
    shards: Sequence[int],
    workers: int,
    report: Callable[[int, bool], None],
) -> None:
    """Convert shards in any order.

    Args:
        conversion: what is converted.
        shards: to convert.
        workers: processes; with 1, it is this one.
        report: called with each shard and whether it is there now (see ``convert_shard``).

    Raises:
        InputError: a shard cannot be read, or a worker has died.
        OSError: a shard cannot be written.
    """
    workers = min(workers, len(shards))
    if workers < 2:
        for shard in shards:
            report(shard, convert_shard(conversion, shard))
        return
    context = multiprocessing.get_context("spawn")
    others = {*multiprocessing.active_children()}
    alive, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _follow, (alive,))
    try:
        convert = partial(_convert_shard, conversion)
        with signals_held():
            running = {pool.submit(convert, shard): shard for shard in shards}
        for done in as_completed(running):
            report(running[done], done.result())
        pool.shutdown()
    except BrokenProcessPool:
        raise InputError(
            "a process that converts shards has died (was it killed, for lack of memory?); what is "
            "converted stays: give the same command again, with a smaller --num-workers"
        ) from None
    except BaseException:
        # In the middle of a shard, and of their own start, in which they would complain.
        for worker in {*multiprocessing.active_children()} - others:
            worker.kill()
        raise
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        alive.close()


def _follow(alive: Connection) -> None:
    """In a worker: end when the parent closes its end of the pipe, or dies."""
    leave_to_parent(signal.SIGINT)  # Ctrl-C goes to all
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)


def _convert_shard(conversion: Conversion, shard: int) -> bool:
    try:
        return convert_shard(conversion, shard)
    except InputError as error:
        raise InputError(str(error)) from None  # of a kind that goes from process to process
