"""Arrow IPC files and streams with random access by row."""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from dspark.capture.conversations.arrow_batches import IPC_FILE
from dspark.capture.conversations.records import COLUMNS, PICTURE_COLUMNS, Record
from dspark.capture.conversations.spool import SpoolCache, first_records, record_of
from dspark.capture.file_digest import sampled_digest
from dspark.schemas.errors import InputError

_REMAP_BYTES = 64 << 20
_FAULT_BYTES = 1 << 20
"""What the kernel may map around a row that is touched."""


class ArrowRecords:
    """An Arrow IPC file or stream.

    Uncompressed batches are mapped, and the map is given up every 64 MiB of rows, since pages that
    were touched count as memory of the process. Compressed batches, and streams with dictionaries,
    go through a temporary file (see ``spool``).

    Args:
        path: of the file.
        kind: ``IPC_FILE`` or ``IPC_STREAM``.
        spools: shared by all files of a dataset.

    Raises:
        InputError: not readable.
    """

    def __init__(self, path: Path, kind: str, spools: SpoolCache) -> None:
        self._path = path
        self._kind = kind
        self._spools = spools
        self._map: Any = None
        self._touched = 0
        self._offsets: list[int] = []
        try:
            self._survey()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"--data {path}: not a readable Arrow {kind} ({error})") from None

    def _survey(self) -> None:
        """Where each batch starts, its rows, and whether rows can be read from the map."""
        with pa.memory_map(str(self._path)) as source:
            whole = source.read_buffer(source.size())
            source.seek(0)
            is_file = self._kind == IPC_FILE
            self._schema = (ipc.open_file if is_file else ipc.open_stream)(source).schema
            self._wanted = [name for name in COLUMNS if name in self._schema.names]
            source.seek(0)
            batches = _file_batches(source) if is_file else _stream_batches(source)
            first = next(batches, None)
            self._mapped = first is None or _lies_in(first, whole)
            if not is_file and any(_has_dictionary(field.type) for field in self._schema):
                self._mapped = False
            source.seek(0)
            if self._mapped:
                batches = _file_batches(source) if is_file else _stream_batches(source)
                rows = [batch.num_rows for batch in batches]
                if not is_file:
                    self._offsets = _stream_offsets(source)
            else:
                one = ipc.IpcReadOptions(included_fields=[_cheapest(self._schema)])
                batches = _file_batches(source, one) if is_file else _stream_batches(source, one)
                rows = [batch.num_rows for batch in batches]
                if not is_file:
                    rows = [sum(rows)]  # a part that is entered at its beginning only
            size = 3 * source.size()  # a guess of what it decompresses to
            self._bytes = [size * n // max(1, sum(rows)) for n in rows]
        self._ends = np.cumsum([0, *rows])[1:]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def columns(self) -> list[str]:
        return list(self._schema.names)

    def read(self, row: int) -> Record:
        part = bisect_right(self._ends, row)
        row -= int(self._ends[part - 1]) if part else 0
        if not self._mapped:
            size = self._bytes[part]
            return self._spools.read(self._kind, self._path, part, self._wanted, size, row)
        if self._map is None or self._touched > _REMAP_BYTES:
            self._map, self._touched = pa.memory_map(str(self._path)), 0
        one = self._batch(part).select(self._wanted).slice(row, 1)
        self._touched += max(one.nbytes, _FAULT_BYTES)
        return record_of(one, 0)

    def _batch(self, part: int) -> pa.RecordBatch:
        if self._kind == IPC_FILE:
            return ipc.open_file(self._map).get_batch(part)
        self._map.seek(self._offsets[part])
        return ipc.read_record_batch(ipc.read_message(self._map), self._schema)

    def head(self, count: int) -> list[Record]:
        if self._mapped:
            rows = [self.read(row) for row in range(min(count, len(self)))]
            return [{k: v for k, v in r.items() if k not in PICTURE_COLUMNS} for r in rows]
        texts = [name for name in self._wanted if name not in PICTURE_COLUMNS]
        return first_records(self._kind, self._path, texts, self._bytes, count)

    def fingerprint(self) -> str:
        return sampled_digest(self._path)


def _file_batches(source: Any, options: Any = None) -> Iterator[pa.RecordBatch]:
    file = ipc.open_file(source, options=options)
    yield from (file.get_batch(i) for i in range(file.num_record_batches))


def _stream_batches(source: Any, options: Any = None) -> Iterator[pa.RecordBatch]:
    yield from ipc.open_stream(source, options=options)


def _stream_offsets(source: Any) -> list[int]:
    """Where the message of each record batch starts, in a stream without dictionaries."""
    source.seek(0)
    ipc.read_message(source)  # the schema
    offsets = []
    while True:
        offsets.append(source.tell())
        try:
            ipc.read_message(source)
        except EOFError:
            return offsets[:-1]


def _cheapest(schema: pa.Schema) -> int:
    """A column that takes little to read: one without nesting, if there is one."""
    flat = (i for i, field in enumerate(schema) if not pa.types.is_nested(field.type))
    return next(flat, 0)


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _lies_in(batch: pa.RecordBatch, whole: pa.Buffer) -> bool:
    """Whether the batch's buffers are those of the mapped file: not so where it is compressed."""
    return all(
        whole.address <= buffer.address <= whole.address + whole.size
        for column in batch.columns
        for buffer in column.buffers()
        if buffer is not None and buffer.size
    )
