"""What a reader needs to know of every row of a cache, in one file that is mapped and not read.

``index/columns.safetensors`` holds three columns of the sample indexes, dataset row after dataset
row. It is written from them when a capture finishes, so that nobody has to open them all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dspark.schemas.commands import capture_command, to_repeat
from dspark.schemas.digest import FileDigest, file_digest
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.durable import replacing, write_all
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.fields import Field
from dspark.schemas.paths import columns_path
from dspark.schemas.shard_layout import ShardLayout

if TYPE_CHECKING:
    from dspark.schemas.manifest import Manifest

NAMES = ("length", "image_tokens", "loss_tokens")
_CHECKED_ROWS = 1 << 16
"""Rows that are checked at a time."""


@dataclass(frozen=True)
class Columns:
    """Columns of the sample indexes of all shards, mapped from their file.

    Attributes:
        length: int32 ``[M]``, stored tokens of each dataset row, 0 where it was skipped.
        image_tokens: int32 ``[M]``, positions of each row that a picture fills.
        loss_tokens: int32 ``[M]``, supervised positions of each row.
    """

    length: np.ndarray
    image_tokens: np.ndarray
    loss_tokens: np.ndarray

    def are_those_of(self, table: pa.Table, rows: range) -> bool:
        """Whether an index says the same.

        Args:
            table: of the index, as ``index.read_index`` gives it.
            rows: dataset rows of its shard.
        """
        return all(
            np.array_equal(getattr(self, name)[rows.start : rows.stop], table[name].to_numpy())
            for name in NAMES
        )


def columns_layout(rows: int) -> ShardLayout:
    """Header and size of the file for M ``rows``: a safetensors file of I32 columns."""
    return ShardLayout([Field(name, "I32", ()) for name in NAMES], rows)


def write_columns(root: Path, rows: int, indexes: Iterable[pa.Table]) -> FileDigest:
    """Write the columns durably and atomically, holding one index at a time.

    Args:
        root: the cache.
        rows: M.
        indexes: of all shards in order, as ``index.read_index`` gives them.

    Returns:
        What the manifest is to say of the file.
    """
    layout = columns_layout(rows)
    start = 0
    with replacing(columns_path(root)) as file:
        write_all(file, layout.header)
        file.truncate(layout.file_size)
        for table in indexes:
            for place, name in enumerate(NAMES):
                values = np.ascontiguousarray(table[name].to_numpy(), "<i4")
                offset = len(layout.header) + 4 * (place * rows + start)
                file.seek(offset)
                write_all(file, values.data.cast("B") if len(values) else b"")
            start += len(table)
    return file_digest(columns_path(root))


def columns_are_sound(root: Path, manifest: "Manifest") -> bool:
    """Whether the file is there as the manifest has it.

    Raises:
        OSError: it cannot be read, so it may be sound.
    """
    try:
        return file_digest(columns_path(root)) == manifest.columns
    except OSError as error:
        if is_unreadable(error):
            raise
        return False


def read_columns(root: Path, manifest: "Manifest") -> Columns:
    """Map the columns of a finished cache.

    The file is taken for hostile: it must have the size and header that follow from the number of
    rows, its digest, numbers that rows can have, and the sums that the manifest counts.

    Raises:
        IncompatibleCacheError: it is missing or damaged.
        UnreadableError: the system does not let it be read.
    """
    path = columns_path(root)
    try:
        _check_file(path, manifest)
        columns = _map(path, manifest.num_samples)
        _check_numbers(columns, manifest)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_unreadable(error):
            raise UnreadableError(path, error) from None
        problem = error.strerror if isinstance(error, OSError) else f"damaged: {error}"
        raise IncompatibleCacheError(
            f"{path}: {problem}; {'move it away, and ' if path.is_dir() else ''}this writes it "
            f"anew{to_repeat(manifest)}: {capture_command(root, manifest)}"
        ) from None
    return columns


def _check_file(path: Path, manifest: "Manifest") -> None:
    layout = columns_layout(manifest.num_samples)
    size = path.stat().st_size
    if path.is_file() and size != layout.file_size:
        raise ValueError(f"{size:,} bytes long, {layout.file_size:,} expected")
    if file_digest(path) != manifest.columns:
        raise ValueError("its bytes do not have the digest of the manifest")
    with open(path, "rb", buffering=0) as file:
        if file.read(len(layout.header)) != layout.header:
            raise ValueError("its header is not the one that the manifest describes")


def _map(path: Path, rows: int) -> Columns:
    start = len(columns_layout(rows).header)
    mapped = np.memmap(path, "<i4", "r", start, (len(NAMES), rows))
    return Columns(*(np.asarray(column) for column in mapped))


def _check_numbers(columns: Columns, manifest: "Manifest") -> None:
    sums = np.zeros(1 + len(NAMES), np.int64)
    for start in range(0, manifest.num_samples, _CHECKED_ROWS):
        length, *others = (getattr(columns, name)[start : start + _CHECKED_ROWS] for name in NAMES)
        for name, counts, most in (
            ("length", length, manifest.max_length),
            *((name, counts, length) for name, counts in zip(NAMES[1:], others, strict=True)),
        ):
            if (impossible := (counts < 0) | (counts > most)).any():
                raise ValueError(
                    f"the {name} of dataset row {start + int(impossible.argmax())} is not what a "
                    "row can have"
                )
        sums += [np.count_nonzero(length), *(c.sum(dtype=np.int64) for c in (length, *others))]
    counts = manifest.counts
    if sums.tolist() != [counts.ok, counts.tokens, counts.image_tokens, counts.loss_tokens]:
        raise ValueError("its sums are not the counts of the manifest")
