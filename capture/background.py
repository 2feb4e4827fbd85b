"""Writing captured batches and committing shards while the target goes on."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from torch import Tensor

from dspark.capture.batch import FINITE, row_starts, row_tensors
from dspark.capture.host_copies import HostCopies, HostCopy
from dspark.capture.new_shard import NewShard
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.shard_writer import ShardWriter
from dspark.schemas.index import OK, IndexRow, write_index
from dspark.schemas.paths import CachePaths

_BATCHES = 2
"""That may be on their way to the disk while the target runs another one."""

_THREADS = 2
"""That write."""


@dataclass(frozen=True)
class _Written:
    entries: list[IndexRow]
    bytes: int


@dataclass
class OpenShard:
    """A claimed shard that is being captured.

    Attributes:
        shard: its rows.
        writer: of its file.
        index: entries of the rows that did not run, by dataset row.
        head_error: of its index.
    """

    shard: NewShard
    writer: ShardWriter
    index: dict[int, IndexRow] = field(default_factory=dict)
    head_error: float | None = None
    parts: "list[Future[_Written]]" = field(default_factory=list)


@dataclass(frozen=True)
class _Batch:
    samples: int
    tokens: int
    parts: "list[Future[_Written]]"


class BackgroundWriter:
    """Threads that write batches, and one that commits the shard before.

    Use as a context manager. Failures in the background are raised by the next call of any method,
    or by ``finish``. What was not committed when the block ends is removed.

    Args:
        paths: of the part of the cache that is written.
        progress: told of each batch and shard, in the thread that calls.
    """

    def __init__(self, paths: CachePaths, progress: Callable[[Step], None]) -> None:
        self._paths = paths
        self._progress = progress
        self._threads = ThreadPoolExecutor(_THREADS, "dspark-write")
        self._committer = ThreadPoolExecutor(1, "dspark-commit")
        self._copies = HostCopies(_BATCHES)
        self._batches: deque[_Batch] = deque()
        self._commit: Future[None] | None = None
        self._open: list[OpenShard] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # Work that was done is not lost to another's error; who stops the capture need not wait.
        stopped = error is not None and not isinstance(error, Exception)
        self._threads.shutdown(cancel_futures=stopped)
        self._committer.shutdown(cancel_futures=stopped)
        for opened in self._open:
            opened.writer.close()

    def open(self, shard: NewShard, writer: ShardWriter) -> OpenShard:
        """Take over a claimed shard: it is closed when it is committed, or when the block ends."""
        self._open.append(OpenShard(shard, writer))
        return self._open[-1]

    def write(self, opened: OpenShard, inputs: BatchInputs, packed: dict[str, Tensor]) -> None:
        """Write the rows of a batch; waits while too many others are being written.

        Args:
            opened: their shard.
            inputs: of the batch.
            packed: what may be stored of it (see ``batch.packed_batch``), where it was computed.
        """
        self.check()
        while len(self._batches) >= _BATCHES:
            self._report(self._batches.popleft())
        copy = self._copies.start(packed)
        ids = inputs.tensors["input_ids"]
        rows = list(zip(inputs.rows, ids, row_starts(inputs.rows), strict=True))

        def write(part: int) -> _Written:
            return _write_rows(opened, rows[part::_THREADS], copy)

        parts = [self._threads.submit(write, i) for i in range(min(_THREADS, len(rows)))]
        opened.parts += parts
        self._batches.append(_Batch(len(rows), sum(len(row) for row in inputs.rows), parts))

    def commit(self, opened: OpenShard) -> None:
        """Commit a shard, all of whose batches were given to ``write``, after the one before."""
        self._await_commit()
        self._commit = self._committer.submit(self._committed, opened)

    def check(self) -> None:
        """Report what is done, and raise what has failed."""
        while self._batches and all(part.done() for part in self._batches[0].parts):
            self._report(self._batches.popleft())
        if self._commit is not None and self._commit.done():
            self._await_commit()

    def finish(self) -> None:
        """Wait until all is committed."""
        while self._batches:
            self._report(self._batches.popleft())
        self._await_commit()

    def _await_commit(self) -> None:
        if self._commit is not None:
            self._commit.result()
            self._commit = None
            self._progress(Step(shards=1))

    def _report(self, batch: _Batch) -> None:
        written = sum(part.result().bytes for part in batch.parts)
        self._progress(Step(batch.samples, batch.tokens, written))

    def _committed(self, opened: OpenShard) -> None:
        index = opened.index
        for part in opened.parts:
            index |= {entry.sample: entry for entry in part.result().entries}
        shard = opened.shard
        opened.writer.commit()
        facts = {
            "head_error": opened.head_error,
            "identity": shard.plan.manifest.identity_hash,
        }
        entries = [index[sample] for sample in shard.samples]
        write_index(self._paths.index(shard.number), entries, facts)
        opened.writer.close()
        self._open.remove(opened)


def _write_rows(opened: OpenShard, rows: list[tuple], copy: HostCopy) -> _Written:
    """Write some rows of a batch, each given with its ids and its first token in the batch."""
    packed = copy.wait()
    shard, manifest = opened.shard, opened.shard.plan.manifest
    entries, size = [], 0
    for row, ids, start in rows:
        finite = bool(packed[FINITE][start : start + len(row)].all())
        entry = shard.index_row(row, finite=finite)
        if entry.status == OK:
            tensors = row_tensors(row, ids[: len(row)], packed, start, manifest)
            written = opened.writer.write_row(entry.row, tensors)
            entry = replace(entry, digests=written.digests)
            size += written.bytes
        entries.append(entry)
    return _Written(entries, size)
