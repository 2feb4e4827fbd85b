"""One field of one row, read from an open shard."""

import torch
from torch import Tensor

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.fields import Field
from dspark.schemas.stored_shard import StoredShard


def read_field(shard: StoredShard, field: Field, row: int, length: int) -> Tensor:
    """The real tokens of a field of a row: ``[L, …]`` (``[3, L]`` for mRoPE positions).

    Args:
        shard: open for reading.
        field: one of its fields.
        row: row of the shard.
        length: L, its stored tokens, at least 1.

    Raises:
        DamagedError: they are not what was written.
        OSError: they cannot be read.
    """
    data = bytearray(length * field.token_bytes)
    runs, start = [], 0
    for _, size in field.extents(length):
        runs.append(memoryview(data)[start : start + size])
        start += size
    shard.read_into(field, row, length, runs)
    shape = list(field.row_shape)
    shape[field.token_axis] = length
    return torch.frombuffer(data, dtype=torch_dtype(field.dtype)).view(shape)
