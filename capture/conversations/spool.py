"""Random access to the rows of large Parquet row groups and Arrow batches.

Neither can be entered in the middle, so its small batches are copied once to a temporary file,
which has no name and goes with the process. A forked process makes its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc

from dspark.capture.conversations import arrow_batches
from dspark.capture.conversations.records import Record, without_nulls
from dspark.schemas.errors import InputError

_OWN_PROCESS_BYTES = 32 << 20
SPOOL_BYTES = 4 << 30


class Spool:
    """Record batches on disk, appended once, read by row."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="dspark-rows-")  # noqa: SIM115 - outlives us
        self._offsets = [0]
        self._ends: list[int] = []

    @property
    def bytes(self) -> int:
        return self._offsets[-1]

    def append(self, batch: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self._file.write(sink.getvalue())
        self._offsets.append(self._file.tell())
        self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)

    def seal(self) -> None:
        self._file.flush()

    def find(self, row: int) -> tuple[int, int]:
        """The batch that holds a row, and the row's number in it."""
        number = bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)

    def read(self, number: int) -> pa.RecordBatch:
        start, end = self._offsets[number : number + 2]
        return ipc.open_stream(os.pread(self._file.fileno(), end - start, start)).read_next_batch()


def record_of(batch: Any, row: int) -> Record:
    """One row of a record batch or table."""
    record: Record = batch.slice(row, 1).to_pylist()[0]
    return {k: without_nulls(v) for k, v in record.items()}


class SpoolCache:
    """The spools read last; together they take at most 4 GiB of disk, or one part of a file."""

    def __init__(self, limit: int = SPOOL_BYTES) -> None:
        self._spools: OrderedDict[tuple[Path, int], Spool] = OrderedDict()
        self._limit = limit
        self._recent: tuple[Any, Any] = (None, None)

    def read(
        self, kind: str, path: Path, part: int, columns: list[str], part_bytes: int, row: int
    ) -> Record:
        """A row of a part of a file, whose spool is filled now if it is not there."""
        spool = self._get(kind, path, part, columns, part_bytes)
        number, row = spool.find(row)
        if self._recent[0] != (path, part, number):
            self._recent = (path, part, number), spool.read(number)
        return record_of(self._recent[1], row)

    def _get(self, kind: str, path: Path, part: int, columns: list[str], part_bytes: int) -> Spool:
        key = path, part
        if key not in self._spools:
            self._make_room(part_bytes)
            spool = Spool()
            try:
                for batch in part_batches(kind, path, part, columns, part_bytes):
                    spool.append(batch)
                spool.seal()
            except OSError as error:
                raise InputError(
                    f"--data {path}: its rows do not fit into the temporary folder "
                    f"{tempfile.gettempdir()} ({error.strerror}); set TMPDIR to one with "
                    f"{part_bytes / 1e9:.1f} GB free, or write the file in smaller row groups"
                ) from None
            self._spools[key] = spool
        self._spools.move_to_end(key)
        return self._spools[key]

    def _make_room(self, wanted: int) -> None:
        used = sum(spool.bytes for spool in self._spools.values())
        while self._spools and used + wanted > self._limit:
            used -= self._spools.popitem(last=False)[1].bytes


def first_records(
    kind: str, path: Path, columns: list[str], part_bytes: Sequence[int], count: int
) -> list[Record]:
    """The first records of a file, without a spool: only the parts that hold them are opened."""
    records: list[Record] = []
    for part, size in enumerate(part_bytes):
        with closing(part_batches(kind, path, part, columns, size)) as batches:
            for batch in batches:
                missing = count - len(records)
                records += [record_of(batch, i) for i in range(min(missing, len(batch)))]
                if len(records) == count:
                    return records
    return records


def part_batches(
    kind: str, path: Path, part: int, columns: list[str], part_bytes: int
) -> Generator[pa.RecordBatch, None, None]:
    """The small batches of a part of a file; read by a process of its own where it is large.

    Raises:
        InputError: the part cannot be read.
    """
    if part_bytes <= _OWN_PROCESS_BYTES:
        try:
            yield from arrow_batches.small_batches(kind, str(path), part, columns)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, str(error)) from None
        return
    program = [sys.executable, "-P", arrow_batches.__file__, kind, str(path), str(part)]
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            [*program, json.dumps(columns)], stdout=subprocess.PIPE, stderr=messages
        ) as process,
    ):
        try:
            yield from ipc.open_stream(process.stdout)
            failed = process.wait() != 0
        except pa.ArrowException:
            failed = True
        finally:
            process.kill()
        if failed:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").strip().splitlines()
            raise _unreadable(path, lines[-1] if lines else f"status {process.wait()}")


def _unreadable(path: Path, problem: str) -> InputError:
    return InputError(f"--data {path}: it cannot be read ({problem}); is the file whole?")
