"""JSON Lines with random access: one pass notes where each line starts and ends."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.records import Record
from dspark.capture.file_digest import sampled_digest

_CHUNK = 1 << 22
_SHORT = 16
_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """A file with one JSON object a line; blank lines are no rows.

    Memory: 16 bytes a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._ends = _lines(path)

    def __len__(self) -> int:
        return len(self._starts)

    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.head(64) for key in record))

    def read(self, row: int) -> Record:
        start, end = int(self._starts[row]), int(self._ends[row])
        return parse_record(read_range(self._path, start, end))

    def head(self, count: int) -> list[Record]:
        return readable(self.read, min(count, len(self)))

    def fingerprint(self) -> str:
        return sampled_digest(self._path)


def readable(read: Any, count: int) -> list[Record]:
    """The first ``count`` records without the broken ones."""
    records = []
    for row in range(count):
        try:
            records.append(read(row))
        except BadRowError:
            continue
    return records


def read_range(path: Path, start: int, end: int) -> bytes:
    """The bytes ``[start, end)`` of a file."""
    with open(path, "rb", buffering=0) as f:
        parts, at = [], start
        while at < end and (part := os.pread(f.fileno(), end - at, at)):
            parts.append(part)
            at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_record(data: bytes) -> Record:
    """A JSON object.

    Raises:
        BadRowError: it is none.
    """
    try:
        record = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise BadRowError("broken JSON line", str(error)) from None
    if not isinstance(record, dict):
        raise BadRowError("broken JSON line", f"{type(record).__name__} instead of an object")
    return record


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of the start and end of every line that is not blank."""
    newlines = [np.zeros(0, np.int64)]
    size = 0
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK):
            newlines.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size)
            size += len(chunk)
        ends = np.concatenate([*newlines, np.array([size], np.int64)])
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
        keep = ends > starts
        for i in np.flatnonzero(keep & (ends - starts < _SHORT)):
            f.seek(int(starts[i]))
            keep[i] = bool(f.read(int(ends[i] - starts[i])).removeprefix(_BOM).strip())
    return starts[keep], ends[keep]
