"""JSON Lines: one pass notes where each line starts and ends."""

from pathlib import Path

import numpy as np

from dspark.capture.conversations.json_records import BOM, JsonRecords

_CHUNK = 1 << 22
_SHORT = 16


def open_json_lines(path: Path) -> JsonRecords:
    """A file with one JSON object a line; blank lines are no rows."""
    return JsonRecords(path, *_lines(path))


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
            keep[i] = bool(f.read(int(ends[i] - starts[i])).removeprefix(BOM).strip())
    return starts[keep], ends[keep]
