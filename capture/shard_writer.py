"""Writing a shard in place: real rows at their final offset, padding never."""

import os
from pathlib import Path

from torch import Tensor, uint8

from dspark.schemas.digest import row_digest
from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.durable import publish, tmp_path
from dspark.schemas.shard_layout import ShardLayout


class ShardWriter:
    """A shard file under its temporary name, extended to full size, header in place.

    Rows may come in any order. ``commit`` makes the file durable and gives it its name; without it
    the temporary file is left for the next run to overwrite.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self._path = path
        self._layout = layout
        self._file = open(tmp_path(path), "wb", buffering=0)  # noqa: SIM115
        self._file.write(layout.header)
        self._file.truncate(layout.file_size)
        self.bytes_written = len(layout.header)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write_row(self, row: int, tensors: dict[str, Tensor]) -> int:
        """Write the real tokens of one row.

        Args:
            row: row of the shard.
            tensors: every field, contiguous on the CPU, ``[L, …]`` (``[3, L]`` for mRoPE
                positions), in the field's type.

        Returns:
            The row's digest.
        """
        runs: list[memoryview] = []
        for field in self._layout.fields:
            tensor = tensors[field.name]
            assert tensor.dtype == torch_dtype(field.dtype), field.name
            data = tensor.contiguous().view(uint8).numpy().reshape(-1).data.cast("B")
            length = tensor.shape[field.token_axis]
            start = 0
            for offset, size in self._layout.row_extents(field, row, length):
                runs.append(data[start : start + size])
                self._write(runs[-1], offset)
                start += size
            assert start == len(data), field.name
        return row_digest(runs)

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        self.bytes_written += done

    def commit(self) -> None:
        """Make the data durable and publish the file."""
        os.fsync(self._file.fileno())
        publish(self._path)
