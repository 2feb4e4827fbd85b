"""Batches streamed from a cache: rows are read ahead by a few threads into reused buffers."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from dspark.schemas.cores import usable_cores
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.buffers import ReadBuffers
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.staging import Staged, Staging

# Batches in memory: one with the consumer, the others being read.
RING = 3
# Batches beyond those that the system is told of.
ADVISED = 2
# A disk wants more requests at once than a small machine has cores; more than so many help no disk.
_THREADS = (4, 16)


def read_threads() -> int:
    """Threads that read for one stream."""
    least, most = _THREADS
    return min(max(usable_cores(), least), most)


@dataclass
class _Read:
    """A batch that is being read.

    Attributes:
        rows: dataset rows.
        buffers: where they come to.
        reads: what to wait for; each gives the bytes that it read.
        staged: the same on the device, once its copy was started.
    """

    rows: Sequence[int]
    buffers: ReadBuffers
    reads: list[Future[int]]
    staged: Staged | None = None

    def is_read(self) -> bool:
        return all(read.done() for read in self.reads)


class BatchStream:
    """Iterates once over batches of rows; a context manager that stops its threads on leaving.

    Only the given fields and only real rows are read. The longest row of a batch comes first: what
    the batch before left beyond a row's tokens is then less, and is what must be cleared. The
    tensors of a batch are valid until the next batch is asked for. A read that fails raises its
    error here, in the place of its batch.

    Attributes:
        bytes_read: bytes of all batches handed out so far, as read from the shards.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Sequence[Field],
        batches: Iterable[Sequence[int]],
        *,
        batch_size: int,
        trim: bool,
        device: torch.device | None = None,
    ) -> None:
        """Prepare the ring; reading starts with the iteration.

        Args:
            cache: where rows are read from.
            fields: what to read of each row.
            batches: dataset rows of each batch.
            batch_size: B, rows of the largest batch.
            trim: cut each batch to its longest row; else all have the cache's T tokens.
            device: where the tensors shall lie; the CPU by default.

        Raises:
            InputError: the ring does not fit into memory.
        """
        self.bytes_read = 0
        self._abandon = cache.abandon
        self._lengths = np.asarray(cache.lengths)  # plain: a mapped array is slow to index
        self._fields = [(cache.part_of(field), field) for field in fields]
        self._batches = iter(batches)
        self._trim = trim
        self._device = device or torch.device("cpu")
        tokens = int(cache.lengths.max(initial=0)) if trim else cache.manifest.max_length
        self._tokens = tokens
        elsewhere = self._device.type != "cpu"
        try:
            self._ring = [ReadBuffers(fields, batch_size, tokens, elsewhere) for _ in range(RING)]
            self._staging = Staging(fields, batch_size, tokens, self._device) if elsewhere else None
        # No memory; more than a size can be.
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            way_out = "give a smaller one" if trim else "give a smaller one, or --trim"
            raise InputError(
                f"--batch-size {batch_size}: {RING} batches of that many rows of {tokens:,} tokens "
                f"do not fit into memory; {way_out} ({error})"
            ) from None
        self._threads = read_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dspark-read")

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon()
        self._pool.shutdown(cancel_futures=True)
        if self._staging:
            self._staging.close()

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch (see ``Batch``)."""
        free = deque(self._ring)
        reading: deque[_Read] = deque()
        announced = self._announced()
        while True:
            while free and (rows := next(announced, None)) is not None:
                reading.append(self._start(rows, free.popleft()))
            if not reading:
                return
            read = reading.popleft()
            self.bytes_read += sum(part.result() for part in read.reads)
            if self._staging is None:
                yield self._batch(read)
            else:
                self._stage(read)
                # Meanwhile, unless the disk is what all wait for.
                if reading and reading[0].is_read():
                    self._stage(reading[0])
                assert read.staged
                self._staging.wait(read.staged)
                yield self._batch(read)
                self._staging.release(read.staged)
            free.append(read.buffers)

    def _announced(self) -> Iterator[Sequence[int]]:
        """The rows of each batch, the system being told of those of some more."""
        ahead: deque[Sequence[int]] = deque()
        for batch in self._batches:
            rows = sorted(batch, key=self._lengths.__getitem__, reverse=True)
            self._pool.submit(self._advise, rows)
            ahead.append(rows)
            if len(ahead) > ADVISED:
                yield ahead.popleft()
        yield from ahead

    def _advise(self, rows: Sequence[int]) -> None:
        for row in rows:
            for part, field in self._fields:
                try:
                    part.will_read(row, field)
                except (IncompatibleCacheError, OSError):
                    return  # which the read will say in its place

    def _start(self, rows: Sequence[int], buffers: ReadBuffers) -> _Read:
        """Begin to read ``rows`` into ``buffers``, each thread some of them."""
        shares = min(self._threads, len(rows))
        reads = [
            self._pool.submit(self._read, rows, buffers, range(i, len(rows), shares))
            for i in range(shares)
        ]
        return _Read(rows, buffers, reads)

    def _read(self, rows: Sequence[int], buffers: ReadBuffers, places: Iterable[int]) -> int:
        """Read some rows of a batch. Returns the bytes read."""
        size = 0
        for i in places:
            row = rows[i]
            out = buffers.fill(i, int(self._lengths[row]))
            for (part, field), data in zip(self._fields, out, strict=True):
                size += part.read_row(row, field, data)
                part.check_ids(row, field, data)
        return size

    def _stage(self, read: _Read) -> None:
        """Start to copy a batch to the device, if that was not done."""
        if self._staging and not read.staged:
            read.staged = self._staging.copy(read.buffers, len(read.rows))

    def _batch(self, read: _Read) -> Batch:
        lengths = torch.tensor([int(self._lengths[row]) for row in read.rows])
        tokens = int(lengths.max()) if self._trim else self._tokens
        batch = (read.staged or read.buffers).batch(len(read.rows), tokens)
        batch["length"] = lengths.to(self._device)
        batch["sample"] = torch.tensor(read.rows, dtype=torch.int64).to(self._device)
        return batch
