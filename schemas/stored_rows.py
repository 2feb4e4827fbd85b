"""The stored rows of a shard, as its index lists them."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths


@dataclass(frozen=True)
class RowBytes:
    """Where the bytes of a stored row lie, and what they must be.

    Attributes:
        sample: dataset row.
        row: row of the shard.
        length: real tokens.
        digests: of each field, in the manifest's order.
    """

    sample: int
    row: int
    length: int
    digests: Sequence[int]


@dataclass(frozen=True)
class StoredRow(RowBytes):
    """What the index says of a stored row.

    Attributes:
        image_tokens: positions filled by pictures.
        loss_tokens: supervised positions.
    """

    image_tokens: int
    loss_tokens: int


def stored_rows(paths: CachePaths, manifest: Manifest, shard: int) -> list[StoredRow]:
    """The rows of a committed shard that hold a sample.

    Args:
        paths: of one part of the cache.
        manifest: of that part.
        shard: its number.

    Raises:
        IncompatibleCacheError: its index is damaged, gone or not readable.
    """
    return rows_in(read_index(paths, manifest, shard)[0])


def rows_in(table: pa.Table) -> list[StoredRow]:
    """The rows that hold a sample, of an index as ``index.read_index`` gives it."""
    columns = list(StoredRow.__dataclass_fields__)
    ok = table.filter(pc.equal(table["status"], OK)).select(columns)
    return [StoredRow(**entry) for entry in ok.to_pylist()]
