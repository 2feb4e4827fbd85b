"""Memory for one batch, filled again and again."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import Batch


class Buffers:
    """Room for the rows of a batch, in which all that lies beyond a row's tokens is zero.

    On the CPU it takes memory only where rows were: pages that nothing wrote to are never made.

    Attributes:
        fields: that a row has.
        runs: uint8 ``[B, R, T, n]`` of each field: R runs of T tokens of n bytes a row; R is 1 but
            for position ids of several axes.
        tensors: the same in the fields' types and shapes, ``[B, T, …]`` (``[B, 3, T]`` for mRoPE).
        filled: tokens of each row that are not zero.
    """

    def __init__(
        self, fields: Sequence[Field], rows: int, tokens: int, device: torch.device, pinned: bool
    ) -> None:
        """Make room.

        Args:
            fields: of a row.
            rows: B.
            tokens: T.
            device: where.
            pinned: whether another device shall copy from here.

        Raises:
            RuntimeError, TypeError, ValueError, MemoryError: there is not so much.
        """
        self.fields = tuple(fields)
        self.runs: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for field in fields:
            runs = math.prod(field.row_shape[: field.token_axis])
            shape = (rows, runs, tokens, field.token_bytes // runs)
            plain = device.type == "cpu" and not pinned
            self.runs[field.name] = (
                torch.from_numpy(np.zeros(shape, np.uint8))
                if plain
                else torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
            )
            sizes = list(field.row_shape)
            sizes[field.token_axis] = tokens
            typed = self.runs[field.name].view(torch_dtype(field.dtype))
            self.tensors[field.name] = typed.view(rows, *sizes)
        self.filled = [0] * rows

    def batch(self, rows: int, tokens: int) -> Batch:
        """The first tokens of the first rows, as they lie here."""
        return {
            field.name: self.tensors[field.name][:rows].narrow(1 + field.token_axis, 0, tokens)
            for field in self.fields
        }


class ReadBuffers(Buffers):
    """Those that files are read into, in the memory of the CPU."""

    def __init__(self, fields: Sequence[Field], rows: int, tokens: int, pinned: bool) -> None:
        super().__init__(fields, rows, tokens, torch.device("cpu"), pinned)
        self._arrays = [self.runs[field.name].numpy() for field in fields]
        self.rows = [[memoryview(a[i].reshape(-1)) for a in self._arrays] for i in range(rows)]
        """Bytes of each row, field by field."""

    def fill(self, row: int, tokens: int) -> list[memoryview]:
        """Where to read so many tokens of a row to; what an earlier batch left beyond is cleared.

        Not with torch, which would start threads of its own in each thread that reads.
        """
        if self.filled[row] > tokens:
            for array in self._arrays:
                array[row, :, tokens : self.filled[row]] = 0
        self.filled[row] = tokens
        return self.rows[row]
