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
        token_bytes: of one token, over all fields, on average.
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
    tokens, image_tokens = rows.counts.tokens, rows.counts.image_tokens
    real_bytes = sum(field.real_bytes(tokens, image_tokens) for field in fields)
    headers = num_shards * len(layout.header)
    pictures = image_tokens / max(1, tokens)
    return ShardSizes(
        token_bytes=round(real_bytes / tokens) if tokens else sum(f.token_bytes for f in fields),
        real_bytes=real_bytes,
        disk_bytes=headers + rows.total(lambda length: row_disk_bytes(fields, length, pictures)),
        file_bytes=num_shards * layout.file_size,
    )


def row_disk_bytes(fields: Sequence[Field], length: int, pictures: float = 1) -> int:
    """Bytes of the blocks that one row of ``length`` tokens takes, a share ``pictures`` of them
    being of pictures.

    Each run of a field takes whole blocks, but no more than its padded length: neighbours share
    those of a field that is narrower than a block.
    """
    taken = 0
    for field in fields:
        runs = field.extents(length if field.where is None else round(length * pictures))
        padded = field.row_bytes // len(runs)
        taken += sum(min(-(-size // _BLOCK) * _BLOCK, padded) for _, size in runs)
    return taken
