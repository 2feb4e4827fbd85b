"""The sample index of a shard: a Parquet file with one row per sample."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.schemas.durable import write_file
from dspark.schemas.errors import IncompatibleCacheError

OK = "ok"
SKIPPED = "skipped"

SCHEMA = pa.schema(
    [
        ("sample", pa.int64()),
        ("row", pa.int32()),
        ("id", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("length", pa.int32()),
        ("image_tokens", pa.int32()),
        ("loss_tokens", pa.int32()),
        ("digest", pa.uint64()),
    ]
)
_METADATA_KEY = b"dspark"


@dataclass(frozen=True)
class IndexRow:
    """What the index says of one sample.

    Attributes:
        sample: row of the dataset.
        row: row of the shard.
        id: the dataset's own id of the sample, or an empty string.
        status: ``ok`` or ``skipped``. A skipped sample keeps its row, empty.
        reason: why it was skipped, as ``kind: detail``; empty for ``ok``.
        length: stored tokens.
        image_tokens: positions filled by a picture.
        loss_tokens: supervised positions.
        digest: xxh3-64 of the row's stored bytes, field by field in file order.
    """

    sample: int
    row: int
    id: str
    status: str
    reason: str = ""
    length: int = 0
    image_tokens: int = 0
    loss_tokens: int = 0
    digest: int = 0


def write_index(path: Path, rows: Sequence[IndexRow], metadata: dict[str, Any]) -> None:
    """Write the index durably and atomically: this commits the shard.

    Args:
        path: the final name.
        rows: one entry per sample, in shard order.
        metadata: facts about the whole shard, kept as JSON in the Parquet schema.
    """
    encoded = json.dumps(metadata, sort_keys=True).encode()
    schema = SCHEMA.with_metadata({_METADATA_KEY: encoded})
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([asdict(r) for r in rows], schema=schema), buffer)
    write_file(path, buffer.getvalue())


def index_identity(path: Path) -> str | None:
    """The identity hash that an index carries; None if it is missing or cannot be read."""
    try:
        metadata = json.loads((pq.read_schema(path).metadata or {})[_METADATA_KEY])
        identity: str | None = metadata.get("identity")
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError):
        return None
    return identity


def read_index(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """The index as a table with the columns of ``SCHEMA``, and the shard's metadata.

    Raises:
        IncompatibleCacheError: the file is damaged or is not such an index.
    """
    if not path.exists():
        raise IncompatibleCacheError(
            f"{path}: this sample index is missing, so its shard does not exist; run the capture "
            "again, which redoes this shard alone"
        )
    try:
        table = pq.read_table(path)
        metadata = json.loads((table.schema.metadata or {})[_METADATA_KEY])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise IncompatibleCacheError(
            f"{path}: not a readable sample index ({error}); delete this file and run the capture "
            "again, which redoes this shard alone"
        ) from error
    if not table.schema.remove_metadata().equals(SCHEMA):
        raise IncompatibleCacheError(
            f"{path}: its columns are not those of a sample index; delete this file and run the "
            "capture again, which redoes this shard alone"
        )
    return table, metadata
