"""One field of one row, read from an open shard file."""

from typing import BinaryIO

import torch
from torch import Tensor

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.fields import Field
from dspark.schemas.shard_layout import ShardLayout


def read_field(file: BinaryIO, layout: ShardLayout, field: Field, row: int, length: int) -> Tensor:
    """The real tokens of a field of a row: ``[L, …]`` (``[3, L]`` for mRoPE positions).

    Args:
        file: the shard's file, of the layout's size.
        layout: of the shard.
        field: one of the layout's.
        row: row of the shard.
        length: L, its stored tokens.
    """
    data = bytearray()
    for offset, size in layout.row_extents(field, row, length):
        file.seek(offset)
        data += file.read(size)
    shape = list(field.row_shape)
    shape[field.token_axis] = length
    return torch.frombuffer(data, dtype=torch_dtype(field.dtype)).view(shape)
