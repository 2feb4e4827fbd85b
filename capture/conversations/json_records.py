"""JSON objects at known places of a file, with random access."""

import json
import os
from pathlib import Path

import numpy as np

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.records import Record
from dspark.capture.file_digest import sampled_digest

BOM = b"\xef\xbb\xbf"


class JsonRecords:
    """Objects by number, read when they are wanted. Memory: 16 bytes an object, and one of them."""

    def __init__(self, path: Path, starts: np.ndarray, ends: np.ndarray) -> None:
        """Args:
        path: the file.
        starts: int64 ``[n]``, byte offset of each object.
        ends: int64 ``[n]``, byte offset behind it.
        """
        self._path = path
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.head(64) for key in record))

    def read(self, row: int) -> Record:
        return _parse(_read_range(self._path, int(self._starts[row]), int(self._ends[row])))

    def head(self, count: int) -> list[Record]:
        """The first ``count`` records without the broken ones."""
        records = []
        for row in range(min(count, len(self))):
            try:
                records.append(self.read(row))
            except BadRowError:
                continue
        return records

    def fingerprint(self) -> str:
        return sampled_digest(self._path)


def _read_range(path: Path, start: int, end: int) -> bytes:
    """The bytes ``[start, end)`` of a file."""
    with open(path, "rb", buffering=0) as f:
        parts, at = [], start
        while at < end and (part := os.pread(f.fileno(), end - at, at)):
            parts.append(part)
            at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _parse(data: bytes) -> Record:
    """A JSON object.

    Raises:
        BadRowError: it is none.
    """
    try:
        record = json.loads(data.removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise BadRowError("broken JSON line", str(error)) from None
    if not isinstance(record, dict):
        raise BadRowError("broken JSON line", f"{type(record).__name__} instead of an object")
    return record
