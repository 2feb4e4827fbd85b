"""How many bytes the shards of a cache take."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.capture.estimate.rows import RowEstimate
from dspark.schemas.fields import Field
from dspark.schemas.shard_layout import ShardLayout

_BLOCK = 4096


@dataclass(frozen=True)
class ShardSizes:
    """Bytes of all shards together, but for ``token_bytes``.

    Attributes:
        token_bytes: of one token, over all fields.
        real_bytes: of the real rows: what is written.
        disk_bytes: of the blocks of 4 KiB that these touch: what a file system with holes gives.
        file_bytes: length of the files, padding included: what one without holes gives.
    """

    token_bytes: int
    real_bytes: int
    disk_bytes: int
    file_bytes: int


def shard_sizes(
    fields: Sequence[Field], rows: RowEstimate, *, num_shards: int, rows_per_shard: int
) -> ShardSizes:
    """Bytes of a cache of these rows with these fields."""
    layout = ShardLayout(fields, rows_per_shard)
    token_bytes = sum(field.token_bytes for field in fields)
    headers = num_shards * len(layout.header)
    return ShardSizes(
        token_bytes=token_bytes,
        real_bytes=rows.counts.tokens * token_bytes,
        disk_bytes=headers + rows.total(lambda length: row_disk_bytes(fields, length)),
        file_bytes=num_shards * layout.file_size,
    )


def row_disk_bytes(fields: Sequence[Field], length: int) -> int:
    """Bytes of the blocks that one row of ``length`` tokens takes.

    Each run of a field takes whole blocks, but no more than its padded length: neighbours share
    those of a field that is narrower than a block.
    """
    taken = 0
    for field in fields:
        runs = field.extents(length)
        padded = field.row_bytes // len(runs)
        taken += sum(min(-(-size // _BLOCK) * _BLOCK, padded) for _, size in runs)
    return taken
