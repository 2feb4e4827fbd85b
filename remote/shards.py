"""Rows of a shard that lies at a URL, in either form, read by ranges."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from dspark.remote.store import DamagedObjectError, Store, mend
from dspark.schemas.digest import field_digest
from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes
from dspark.schemas.stored_shard import zarr_layout
from dspark.schemas.zarr_codec import ChunkCodec
from dspark.schemas.zarr_layout import METADATA
from dspark.schemas.zarr_shard import ABSENT, ZarrArray

_TOGETHER = 16 << 20
"""Bytes of rows that are asked for at once."""

_Take: TypeAlias = Callable[[RowBytes, Sequence[memoryview]], None]


class RemoteField:
    """One field of one part of a shard at a URL. May be used by several threads at once.

    Args:
        store: of the cache.
        paths: of the part; objects have its names relative to its root.
        part: manifest of the part.
        shard: its number.
        field: one of the part's.

    Raises:
        DamagedObjectError: the object is not what the manifest describes.
        MissingObjectError: there is none.
        UnreachableError: it cannot be read.

    Attributes:
        field: see above.
        where: URL of the object.
    """

    def __init__(
        self, store: Store, paths: CachePaths, part: Manifest, shard: int, field: Field
    ) -> None:
        self.field = field
        self._url = store.url
        self._place = part.fields.index(field)
        folder, kind = (
            (paths.group(shard), _ZarrObject)
            if part.shard_format.is_zarr
            else (paths.shard(shard), _SafetensorsObject)
        )
        name = str(folder.relative_to(paths.root))
        self.where = store.where(name)
        try:
            self._object: _Object = kind(store, name, part, field)
        except DamagedError as error:
            raise self._damaged(error.problem) from None

    def read(self, row: RowBytes, runs: Sequence[memoryview], *, check: bool = True) -> None:
        """Read the real bytes of a row.

        Args:
            row: of the shard.
            runs: where they go: a view of bytes for each run of ``Field.extents``.
            check: compare them with their digest.

        Raises:
            DamagedObjectError: they are not what was captured.
            UnreachableError: they cannot be read.
        """
        self._decode(self._portion([row]), row, runs, check)

    def rows(
        self, rows: Sequence[RowBytes], *, check: bool = True
    ) -> Iterator[tuple[RowBytes, list[memoryview]]]:
        """Rows one after another, asked for in portions; errors as in ``read``.

        Yields:
            The row, and its runs, valid until the next.
        """
        buffer = bytearray(max((row.length for row in rows), default=0) * self.field.token_bytes)
        for portion in _portions(rows, self.field.token_bytes):
            take = self._portion(portion)
            for row in portion:
                runs, start = [], 0
                for _, size in self.field.extents(row.length):
                    runs.append(memoryview(buffer)[start : start + size])
                    start += size
                self._decode(take, row, runs, check)
                yield row, runs

    def _portion(self, rows: Sequence[RowBytes]) -> _Take:
        try:
            return self._object.load(rows)
        except DamagedError as error:
            raise self._damaged(error.problem, rows[0].sample) from None

    def _decode(self, take: _Take, row: RowBytes, runs: Sequence[memoryview], check: bool) -> None:
        try:
            take(row, runs)
        except DamagedError as error:
            raise self._damaged(error.problem, row.sample) from None
        if check and field_digest(*runs) != row.digests[self._place]:
            raise self._damaged("its bytes are not those that were captured", row.sample)

    def _damaged(self, problem: str, sample: int | None = None) -> DamagedObjectError:
        of_row = "" if sample is None else f" of dataset row {sample}"
        return DamagedObjectError(
            f"{self.where}: {self.field.name}{of_row} is damaged: {problem}; {mend(self._url)}"
        )


def _portions(rows: Sequence[RowBytes], token_bytes: int) -> Iterator[list[RowBytes]]:
    portion: list[RowBytes] = []
    size = 0
    for row in rows:
        more = row.length * token_bytes
        if portion and size + more > _TOGETHER:
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += more
    if portion:
        yield portion


class _Object(Protocol):
    def load(self, rows: Sequence[RowBytes]) -> _Take:
        """Read some rows' bytes; what is returned puts those of one of them into runs."""


class _SafetensorsObject:
    """A field in a safetensors file."""

    def __init__(self, store: Store, name: str, part: Manifest, field: Field) -> None:
        self._store, self._name, self._field = store, name, field
        self._layout = ShardLayout(part.fields, part.rows_per_shard)
        if (size := store.size(name)) != self._layout.file_size:
            raise DamagedError(
                Path(name), f"{size:,} bytes long, {self._layout.file_size:,} expected"
            )

    def load(self, rows: Sequence[RowBytes]) -> _Take:
        extents = [extent for row in rows for extent in self._extents(row)]
        starts = [offset for offset, _ in extents]
        ends = [offset + size for offset, size in extents]
        found = dict(zip(starts, self._store.ranges(self._name, starts, ends), strict=True))

        def take(row: RowBytes, runs: Sequence[memoryview]) -> None:
            for run, (offset, _) in zip(runs, self._extents(row), strict=True):
                run[:] = found[offset]

        return take

    def _extents(self, row: RowBytes) -> list[tuple[int, int]]:
        return self._layout.row_extents(self._field, row.row, row.length)


class _ZarrObject(ZarrArray):
    """A field as the object of a zarr array: its index is kept, chunks are read by ranges."""

    def __init__(self, store: Store, name: str, part: Manifest, field: Field) -> None:
        group = zarr_layout(part)
        self.layout = group.arrays[field.name]
        self._store, self._name = store, f"{name}/{self.layout.object}"
        self.path = Path(self._name)
        self._codec = ChunkCodec(self.layout)
        self._fd = -1
        self._thread = threading.local()
        for document in (METADATA, self.layout.metadata):
            if not store.holds(f"{name}/{document}", group.documents[document]):
                raise DamagedError(
                    self.path, f"its {document} is not the metadata that the manifest asks for"
                )
        size = store.size(self._name)
        self._index_start = size - self.layout.index_bytes
        if self._index_start < 0:
            raise DamagedError(self.path, "shorter than its index")
        (self._index,) = store.ranges(self._name, [self._index_start], [size])
        self._check_index()

    def load(self, rows: Sequence[RowBytes]) -> _Take:
        spans = [self._span(row) for row in rows]
        data = self._store.ranges(self._name, [a for a, _ in spans], [b for _, b in spans])
        found = {
            row.row: (start, part) for row, (start, _), part in zip(rows, spans, data, strict=True)
        }

        def take(row: RowBytes, runs: Sequence[memoryview]) -> None:
            self._thread.span = found[row.row]
            self.read_into(row.row, row.length, runs)

        return take

    def _span(self, row: RowBytes) -> tuple[int, int]:
        """Where the chunks of a row lie, one after another."""
        count = self.layout.chunks(row.length)
        entries = [self._entry(row.row, place) for place in range(count)]
        if any(offset == ABSENT for offset, _ in entries):
            raise DamagedError(self.path, "a chunk of it is missing")
        start = min(offset for offset, _ in entries)
        end = max(offset + size for offset, size in entries)
        if not 0 < end - start <= count * self._codec.most_bytes or end > self._index_start:
            raise DamagedError(self.path, "its chunks do not lie where they must")
        return start, end

    def _read(self, offset: int, size: int) -> bytes:
        start, data = self._thread.span if offset < self._index_start else self._indexed
        found = bytes(data[offset - start : offset - start + size])
        if offset < start or len(found) != size:
            raise DamagedError(self.path, "a chunk of it does not lie in the object")
        return found

    @property
    def _indexed(self) -> tuple[int, memoryview]:
        return self._index_start, self._index
