"""A shard in its zarr form, open for reading: the group, and the object of each field."""

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import google_crc32c
import numpy as np

from dspark.schemas.durable import names
from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.file_reads import open_at_once
from dspark.schemas.zarr_codec import ChunkCodec
from dspark.schemas.zarr_layout import (
    CHECKSUM_BYTES,
    ENTRY_BYTES,
    METADATA,
    ZarrLayout,
)

ABSENT = 2**64 - 1
"""Offset and size of a chunk that is not written."""

_ENTRY = struct.Struct("<QQ")
_PIECE = 1 << 20


class ZarrArray:
    """The object of one field, open for reading. May be used by several threads at once.

    Args:
        folder: the group.
        layout: of the group.
        field: name of the field.

    Raises:
        DamagedError: the metadata are not those that the manifest asks for, or the object's index
            is damaged, as that of a truncated object is.
        OSError: a file is missing or cannot be read.

    Attributes:
        path: of the object.
        layout: of the array.
    """

    def __init__(self, folder: Path, layout: ZarrLayout, field: str) -> None:
        self.layout = layout.arrays[field]
        self.path = folder / self.layout.object
        for name in (METADATA, self.layout.metadata):
            _check_document(folder / name, layout.documents[name])
        self._codec = ChunkCodec(self.layout)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with names(self.path):
                found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError(self.path, "not a file")
            self._index_start = found.st_size - self.layout.index_bytes
            if self._index_start < 0:
                raise DamagedError(self.path, "shorter than its index")
            self._check_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def _check_index(self) -> None:
        """Compare the index with its checksum, in bounded memory."""
        state = 0
        end = self._index_start + self.layout.index_bytes - CHECKSUM_BYTES
        for start in range(self._index_start, end, _PIECE):
            state = google_crc32c.extend(state, self._read(start, min(_PIECE, end - start)))
        if self._read(end, CHECKSUM_BYTES) != state.to_bytes(CHECKSUM_BYTES, "little"):
            raise DamagedError(
                self.path, "its index does not have its checksum, as where it is cut"
            )

    def _entry(self, row: int, place: int) -> tuple[int, int]:
        """Offset and size of a chunk."""
        start = (row * self.layout.chunks_per_row + place) * ENTRY_BYTES
        offset, size = _ENTRY.unpack(self._read(self._index_start + start, ENTRY_BYTES))
        return offset, size

    def check_chunks(self, lengths: np.ndarray) -> None:
        """Check that those chunks are there that must be, one after another, and nothing else.

        Args:
            lengths: stored tokens of the shard's rows, 0 where there is no sample.

        Raises:
            DamagedError: it is not so.
            OSError: the index cannot be read.
        """
        end = 0
        row_bytes = self.layout.chunks_per_row * ENTRY_BYTES
        for row in range(self.layout.rows):
            data = self._read(self._index_start + row * row_bytes, row_bytes)
            entries = np.frombuffer(data, "<u8").reshape(-1, 2)
            count = self.layout.chunks(int(lengths[row]))
            if (entries[count:] != ABSENT).any():
                raise DamagedError(self.path, f"row {row} has chunks beyond its tokens")
            for offset, size in entries[:count].tolist():
                if offset != end or not 0 < size <= self._codec.most_bytes:
                    raise DamagedError(
                        self.path, f"the chunks of row {row} do not lie where they must"
                    )
                end += size
        if end != self._index_start:
            raise DamagedError(self.path, "it has bytes that belong to no chunk")

    def read_into(self, row: int, length: int, runs: Sequence[memoryview]) -> None:
        """See ``stored_shard.StoredShard.read_into``."""
        layout = self.layout
        step = layout.chunk_tokens * layout.run_bytes
        outs = [np.frombuffer(run, np.uint8) for run in runs]
        scratch: np.ndarray | None = None
        for place in range(layout.chunks(length)):
            parts = [out[place * step : (place + 1) * step] for out in outs]
            if layout.runs == 1 and parts[0].size == layout.chunk_bytes:
                self._decode(row, place, parts[0])
                continue
            if scratch is None:
                scratch = np.empty(layout.chunk_bytes, np.uint8)
            self._decode(row, place, scratch)
            for part, run in zip(parts, scratch.reshape(layout.runs, -1), strict=True):
                part[:] = run[: part.size]

    def pieces(self, row: int, length: int) -> Iterator[memoryview]:
        """See ``stored_shard.StoredShard.pieces``."""
        layout = self.layout
        if layout.runs > 1:
            runs = [memoryview(bytearray(length * layout.run_bytes)) for _ in range(layout.runs)]
            self.read_into(row, length, runs)
            yield from runs
            return
        scratch = np.empty(layout.chunk_bytes, np.uint8)
        for place in range(layout.chunks(length)):
            self._decode(row, place, scratch)
            real = min(layout.chunk_tokens, length - place * layout.chunk_tokens)
            yield scratch[: real * layout.run_bytes].data

    def _decode(self, row: int, place: int, out: np.ndarray) -> None:
        """Decode a chunk of a row."""
        offset, size = self._entry(row, place)
        if offset == ABSENT:
            raise DamagedError(self.path, "a chunk of it is missing")
        if size > self._codec.most_bytes or offset + size > self._index_start:
            raise DamagedError(self.path, "a chunk of it does not lie in the object")
        try:
            self._codec.decode(self._read(offset, size), out)
        except ValueError as error:
            raise DamagedError(self.path, f"a chunk of it is damaged: {error}") from None

    def _read(self, offset: int, size: int) -> bytes:
        with names(self.path):
            data = os.pread(self._fd, size, offset)
            while len(data) < size:
                if not (more := os.pread(self._fd, size - len(data), offset + len(data))):
                    raise DamagedError(self.path, f"ends before byte {offset + size}")
                data += more
        return data


class ZarrShard:
    """See ``stored_shard.StoredShard``. Files are opened when their field is first read."""

    def __init__(self, folder: Path, layout: ZarrLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._open: dict[str, ZarrArray] = {}

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
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def array(self, field: str) -> ZarrArray:
        """The object of a field; its errors are those of ``ZarrArray``."""
        found = self._open.get(field)
        if found is None:  # two threads may both open it: one is closed when it is collected
            found = self._open.setdefault(field, ZarrArray(self._folder, self._layout, field))
        return found

    def read_into(self, field: Field, row: int, length: int, runs: Sequence[memoryview]) -> None:
        """See ``stored_shard.StoredShard.read_into``."""
        self.array(field.name).read_into(row, length, runs)

    def pieces(self, field: Field, row: int, length: int) -> Iterator[memoryview]:
        """See ``stored_shard.StoredShard.pieces``."""
        return self.array(field.name).pieces(row, length)


def _check_document(path: Path, expected: bytes) -> None:
    with open(path, "rb", buffering=0, opener=open_at_once) as file:
        if file.read(len(expected) + 1) != expected:
            raise DamagedError(path, "not the metadata that the manifest asks for")
