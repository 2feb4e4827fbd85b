"""Shards fetched ahead of a reader, in the order in which it will read them."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from dspark.remote.mirror import Fetch, Mirror

_THREADS = 8
_MOST_UNFINISHED = 8 * _THREADS
"""Units that have room and are not fetched yet; each has a file open."""

_BEHIND = 4
"""Batches that the reader has asked for and may still be reading."""

_MOST_ROWS = 1 << 20
"""Rows of all batches that are known ahead."""


class FetchAhead:
    """Batches of rows, handed through; a context manager that stops its threads on leaving.

    Meanwhile the shards of the coming batches are fetched, as far as the local cache has room
    beside those that the reader needs before them. A shard for which there is no room when its
    batch is asked for is not fetched: its rows are read one by one from where they lie.

    Args:
        mirror: of the cache.
        fields: names of what is read of each row.
        batches: dataset rows of each batch, in order.
        evicted: called when units may have been removed, so that they are closed.
    """

    def __init__(
        self,
        mirror: Mirror,
        fields: Sequence[str],
        batches: Iterable[Sequence[int]],
        evicted: Callable[[], None],
    ) -> None:
        self._mirror = mirror
        self._fields = list(fields)
        self._source = iter(batches)
        self._evicted = evicted
        self._rows_per_shard = mirror.manifest.rows_per_shard
        self._changed = threading.Condition(threading.RLock())
        # All of what follows is guarded by ``_changed``.
        self._coming: deque[list[int]] = deque()
        self._rows = 0
        self._behind: deque[set[int]] = deque(maxlen=_BEHIND)
        self._needed: Counter[int] = Counter()
        self._starved = False
        self._stopped = False
        self._error: BaseException | None = None
        self._ended = False
        self._fetching: dict[tuple[str, int], Future[None]] = {}
        self._unfinished: set[Future[None]] = set()
        self._seen: set[int] = set()
        self._refused: Counter[int] = Counter()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dspark-fetch")
        self._planner = threading.Thread(target=self._run, name="dspark-plan", daemon=True)
        self._said = False

    def __enter__(self) -> Self:
        self._planner.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._mirror.store.abandon()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._planner.join()
        for future in self._fetching.values():
            future.cancel()
        self._pool.shutdown(cancel_futures=True)
        self._fetching.clear()

    # ── the reader's side ──

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            with self._changed:
                while not self._coming and not self._ended:
                    self._starved = True
                    self._changed.notify_all()
                    self._changed.wait()
                self._starved = False
                if not self._coming:
                    if self._error is not None:
                        raise self._error
                    return
                rows = self._coming.popleft()
                self._rows -= len(rows)
                shards = self._shards(rows)
                if len(self._behind) == _BEHIND:
                    self._forget(self._behind[0])
                self._behind.append(shards)
                self._changed.notify_all()
            yield rows

    def wait(self, field: str, shard: int) -> None:
        """Wait for a unit that is being fetched; return at once if it is not.

        Raises:
            IncompatibleCacheError: it cannot be read, or is damaged.
            OSError: it cannot be written.
        """
        with self._changed:
            future = self._fetching.get((field, shard))
        if future is not None:
            future.result()

    def _shards(self, rows: Sequence[int]) -> set[int]:
        return set((np.asarray(rows) // self._rows_per_shard).tolist())

    def _forget(self, shards: set[int]) -> None:
        for shard in shards:
            self._needed[shard] -= 1
            if not self._needed[shard]:
                del self._needed[shard]
                self._seen.discard(shard)
                del self._refused[shard]
                for field in self._fields:
                    future = self._fetching.get((field, shard))
                    if future is not None and future.done() and not future.exception():
                        del self._fetching[field, shard]

    # ── the planner's side ──

    def _run(self) -> None:
        try:
            for rows in self._source:
                shards = self._shards(rows)
                with self._changed:
                    # Counted before their room is made, so that it does not go to one another.
                    self._needed.update(shards)
                for shard in sorted(shards - self._seen):
                    if not self._place(shard):
                        return
                with self._changed:
                    self._coming.append(list(rows))
                    self._rows += len(rows)
                    self._changed.notify_all()
                    while self._rows > _MOST_ROWS and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _place(self, shard: int) -> bool:
        """Have a shard fetched when there is room, or leave it to be read row by row.

        Returns:
            Whether to go on.
        """
        while True:
            with self._changed:
                while len(self._unfinished) >= _MOST_UNFINISHED and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return False
                kept = {self._mirror.unit(f, s) for s in self._needed for f in self._fields}
                progress = (len(self._coming), sum(self._needed.values()))
                starved = self._starved
            fetches = self._mirror.reserve(self._fields, shard, kept.__contains__)
            if fetches is not None:
                self._start(shard, fetches)
                return True
            if starved:
                with self._changed:
                    # What the reader has just left makes room a few batches later.
                    self._refused[shard] += 1
                    if self._refused[shard] > _BEHIND:
                        self._seen.add(shard)
                        self._say()
                return True
            with self._changed:
                while (
                    not self._stopped
                    and not self._starved
                    and progress == (len(self._coming), sum(self._needed.values()))
                ):
                    self._changed.wait()

    def _start(self, shard: int, fetches: Sequence[Fetch]) -> None:
        self._evicted()
        own = {fetch.name: fetch for fetch in fetches}
        with self._changed:
            self._seen.add(shard)
            for field in self._fields:
                if field in own:
                    task = self._pool.submit(own[field])
                    task.add_done_callback(partial(self._finish, own[field]))
                elif not (path := self._mirror.unit(field, shard)).exists():
                    task = self._pool.submit(self._mirror.wait_for, path)
                    task.add_done_callback(partial(self._finish, None))
                else:
                    continue
                self._fetching[field, shard] = task
                if not task.done():
                    self._unfinished.add(task)

    def _finish(self, fetch: Fetch | None, task: "Future[None]") -> None:
        if fetch is not None and task.cancelled():
            fetch.cancel()
        with self._changed:
            self._unfinished.discard(task)
            self._changed.notify_all()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            logging.getLogger(__name__).warning(
                "dspark: the local cache of %.3g GB has no room for all shards that are read at "
                "the same time, so rows are read one by one from %s, which is slower; give a "
                "larger --local-cache-size",
                self._mirror.local_cache.limit / 1e9,
                self._mirror.url,
            )
