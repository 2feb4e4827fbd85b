"""A shard in its safetensors form, open for reading."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark.schemas.fields import Field
from dspark.schemas.file_reads import read_fully
from dspark.schemas.shard_layout import ShardLayout

_PIECE = 1 << 18
"""Bytes of a read: what was read is still in the processor's cache when it is looked at."""


class SafetensorsShard:
    """See ``stored_shard.StoredShard``. Whoever reads compares rows with their digests.

    Raises:
        OSError: the file is missing or cannot be read.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self._path = path
        self._layout = layout
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read_into(self, field: Field, row: int, length: int, runs: Sequence[memoryview]) -> None:
        """See ``stored_shard.StoredShard.read_into``."""
        extents = self._layout.row_extents(field, row, length)
        for run, (offset, _) in zip(runs, extents, strict=True):
            read_fully(self._fd, run, offset, self._path)

    def pieces(self, field: Field, row: int, length: int) -> Iterator[memoryview]:
        """See ``stored_shard.StoredShard.pieces``."""
        buffer = memoryview(bytearray(_PIECE))
        for offset, size in self._layout.row_extents(field, row, length):
            for start in range(0, size, _PIECE):
                piece = buffer[: min(_PIECE, size - start)]
                read_fully(self._fd, piece, offset + start, self._path)
                yield piece
