"""Rows of a shard written in the other form, or in the same one; each compared with its digest."""

import os
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from itertools import repeat
from pathlib import Path

import numpy as np

from dspark.schemas.digest import field_digest
from dspark.schemas.durable import fsync_dir, make_dir, names, write_all, write_at, write_file
from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.holes import written_ranges
from dspark.schemas.manifest import Manifest
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes
from dspark.schemas.stored_shard import StoredShard, remove_group
from dspark.schemas.zarr_codec import ChunkCodec, checksum
from dspark.schemas.zarr_layout import METADATA, ArrayLayout, ZarrLayout
from dspark.schemas.zarr_shard import ABSENT


class DamagedRowError(Exception):
    """A stored field of a row is not what was captured.

    Attributes:
        path: of the damaged file.
        field: name of the field.
        sample: dataset row.
        problem: what is wrong, in words.
    """

    def __init__(self, path: Path | None, field: str, sample: int, problem: str) -> None:
        super().__init__(f"{field} of dataset row {sample} is damaged: {problem}")
        self.path, self.field, self.sample, self.problem = path, field, sample, problem


def write_safetensors(
    file: FileIO,
    layout: ShardLayout,
    shard: StoredShard,
    part: Manifest,
    rows: Sequence[RowBytes],
) -> None:
    """Write a shard in its safetensors form, with holes where it has them; not yet durably.

    Args:
        file: open for writing; what is in it goes.
        layout: of the new file; its fields are among the part's.
        shard: where the rows are read.
        part: manifest of what is read.
        rows: of the shard that hold a sample.

    Raises:
        DamagedRowError: a row is not what was captured.
        DamagedError: a file of ``shard`` is not what the manifest describes.
        OSError: something cannot be read or written.
    """
    path = Path(str(file.name))
    with names(path):
        file.seek(0)
        file.truncate(0)
        write_all(file, layout.header)
        file.truncate(layout.file_size)
    for field in layout.fields:
        masks = _masks(shard, part, field, rows)
        for (row, runs), mask in zip(_rows(shard, part, field, rows), masks, strict=True):
            extents = layout.row_extents(field, row.row, row.length)
            for run, (offset, size) in zip(runs, extents, strict=True):
                for a, b in written_ranges(field, size, mask):
                    with names(path):
                        write_at(file, run[a:b], offset + a)


def write_zarr(
    folder: Path,
    layout: ZarrLayout,
    shard: StoredShard,
    part: Manifest,
    rows: Sequence[RowBytes],
) -> None:
    """Write a shard in its zarr form durably: the group's own metadata last, which commits it.

    Args:
        folder: the group; what is there goes.
        layout: of the group; its fields are among the part's.
        shard: where the rows are read.
        part: manifest of what is read.
        rows: of the shard that hold a sample, in their order.

    Raises:
        DamagedRowError: a row is not what was captured.
        DamagedError: a file of ``shard`` is not what the manifest describes.
        OSError: something cannot be read or written.
    """
    remove_group(folder)
    make_dir(folder)
    for array in layout.arrays.values():
        (folder / array.metadata).parent.mkdir()
        with FileIO(folder / array.object, "wb") as file, names(folder / array.object):
            _write_object(file, array, _rows(shard, part, array.field, rows))
            os.fsync(file.fileno())
        with FileIO(folder / array.metadata, "wb") as file, names(folder / array.metadata):
            write_all(file, layout.documents[array.metadata])
            os.fsync(file.fileno())
        fsync_dir((folder / array.metadata).parent)
    write_file(folder / METADATA, layout.documents[METADATA])


def _write_object(
    file: FileIO, array: ArrayLayout, rows: Iterable[tuple[RowBytes, list[memoryview]]]
) -> None:
    codec = ChunkCodec(array)
    index = np.full((array.rows, array.chunks_per_row, 2), ABSENT, "<u8")
    step = array.chunk_tokens * array.run_bytes
    padded = np.empty((array.runs, step), np.uint8)
    end = 0
    for row, runs in rows:
        for place in range(array.chunks(row.length)):
            start = place * step
            parts = [np.frombuffer(run[start : start + step], np.uint8) for run in runs]
            chunk = parts[0]
            if array.runs > 1 or chunk.size < step:
                for out, part in zip(padded, parts, strict=True):
                    out[: part.size] = part
                    out[part.size :] = 0
                chunk = padded.reshape(-1)
            data = codec.encode(chunk)
            write_all(file, data)
            index[row.row, place] = end, len(data)
            end += len(data)
    packed = index.tobytes()
    write_all(file, packed + checksum(packed))


def _masks(
    shard: StoredShard, part: Manifest, field: Field, rows: Sequence[RowBytes]
) -> Iterator[np.ndarray | None]:
    """Of each row, the mask of the tokens for which a field is stored; None where all are."""
    mask = next((other for other in part.fields if other.name == field.where), None)
    if mask is None:
        yield from repeat(None, len(rows))
    else:
        for _, (run,) in _rows(shard, part, mask, rows):
            yield np.frombuffer(run, np.uint8)


def _rows(
    shard: StoredShard, part: Manifest, field: Field, rows: Sequence[RowBytes]
) -> Iterator[tuple[RowBytes, list[memoryview]]]:
    """The runs of a field of each row, valid until the next, compared with their digest."""
    place = [f.name for f in part.fields].index(field.name)
    buffer = bytearray(max((row.length for row in rows), default=0) * field.token_bytes)
    for row in rows:
        runs = []
        start = 0
        for _, size in field.extents(row.length):
            runs.append(memoryview(buffer)[start : start + size])
            start += size
        try:
            shard.read_into(field, row.row, row.length, runs)
        except DamagedError as error:
            raise DamagedRowError(error.path, field.name, row.sample, error.problem) from None
        if field_digest(*runs) != row.digests[place]:
            problem = "its bytes are not those that were captured"
            raise DamagedRowError(None, field.name, row.sample, problem)
        yield row, runs
