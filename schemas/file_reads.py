"""Reading files that may be damaged, or not files at all."""

import os
from pathlib import Path

from dspark.schemas.errors import DamagedError


def open_at_once(path: str, flags: int) -> int:
    """``os.open`` that does not wait where ``path`` is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_fully(fd: int, out: memoryview, offset: int, path: Path | str) -> None:
    """Fill ``out``, a view of bytes, from ``offset`` of an open file.

    Raises:
        DamagedError: the file ends before.
        OSError: it cannot be read.
    """
    end = offset + len(out)
    while out:
        try:
            count = os.preadv(fd, [out], offset)
        except OSError as error:
            error.filename = str(path)
            raise
        if count == 0:
            raise DamagedError(Path(path), f"ends before byte {end}")
        out, offset = out[count:], offset + count
