"""Writing a shard in place: real rows at their final offset, padding never."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, uint8

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.digest import field_digest
from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.durable import names, write_all, write_at
from dspark.schemas.holes import written_ranges
from dspark.schemas.shard_layout import ShardLayout


class WrittenRow(NamedTuple):
    """Attributes:
    digests: of each field, in file order.
    bytes: that were written.
    """

    digests: tuple[int, ...]
    bytes: int


class ShardWriter:
    """A shard file under its temporary name, extended to full size, header in place.

    It is claimed for this process until ``close``, which is to follow the writing of the index.
    Rows may come in any order. ``commit`` makes the file durable and gives it its name; without it
    ``close`` removes the file.

    Args:
        path: the final name.
        layout: of the shard.
        is_committed: whether another process finished the shard before it was claimed.

    Raises:
        ClaimedError: another live process has claimed the shard, or finished it meanwhile.
    """

    _file_stays = True
    """Whether ``commit`` gives the file its name."""

    def __init__(
        self, path: Path, layout: ShardLayout, is_committed: Callable[[], bool] = lambda: False
    ) -> None:
        self._path = path
        self._layout = layout
        self._claim = Claim(path)
        self._file = self._claim.file
        try:
            if is_committed():
                raise ClaimedError(path)
            with names(path):
                self._file.truncate(0)
                write_all(self._file, layout.header)
                self._file.truncate(layout.file_size)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the claim. What was not committed is removed."""
        self._claim.close()

    def write_row(self, row: int, tensors: dict[str, Tensor]) -> "WrittenRow":
        """Write the real tokens of one row. Several threads may write, each its own rows.

        Args:
            row: row of the shard.
            tensors: every field, contiguous on the CPU, ``[L, …]`` (``[3, L]`` for mRoPE
                positions), in the field's type.
        """
        digests = []
        written = 0
        for field in self._layout.fields:
            tensor = tensors[field.name]
            assert tensor.dtype == torch_dtype(field.dtype), field.name
            data = tensor.contiguous().view(uint8).numpy().reshape(-1).data.cast("B")
            length = tensor.shape[field.token_axis]
            mask = None if field.where is None else tensors[field.where].numpy()
            runs: list[memoryview] = []
            start = 0
            for offset, size in self._layout.row_extents(field, row, length):
                run = data[start : start + size]
                for a, b in written_ranges(field, size, mask):
                    with names(self._path):
                        write_at(self._file, run[a:b], offset + a, stays=self._file_stays)
                    written += b - a
                runs.append(run)
                start += size
            assert start == len(data), field.name
            digests.append(field_digest(*runs))
        return WrittenRow(tuple(digests), written)

    def commit(self) -> None:
        """Make the data durable and publish the file."""
        self._claim.publish()
