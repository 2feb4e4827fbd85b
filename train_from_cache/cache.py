"""A cache opened for reading: by sample here, in batches by ``stream``."""

import os
from collections.abc import Sequence
from functools import lru_cache
from io import FileIO
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout

_OPEN_SHARDS = 256


class Cache:
    """A finished cache. ``cache[i]`` gives the stored tensors of dataset row ``i``.

    Attributes:
        root: the cache directory.
        manifest: what is stored and how.
        lengths: int32 ``[M]``, stored tokens of each dataset row, 0 where it was skipped.
        image_tokens: int32 ``[M]``, positions of each row that a picture fills.
        loss_tokens: int32 ``[M]``, supervised positions of each row.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest: Manifest = read_manifest(root)
        if not self.manifest.complete:
            raise IncompatibleCacheError(
                f"{root}: the capture is not finished; run the same 'dspark capture' command "
                "again, it continues with the missing shards"
            )
        # Files are opened late, perhaps from another working directory.
        self._paths = CachePaths(root.absolute(), self.manifest.num_shards)
        self._layout = ShardLayout(self.manifest.fields, self.manifest.rows_per_shard)
        size = self.manifest.num_samples
        self.lengths = np.zeros(size, np.int32)
        self.image_tokens = np.zeros(size, np.int32)
        self.loss_tokens = np.zeros(size, np.int32)
        for shard in range(self.manifest.num_shards):
            rows = self.manifest.rows_of(shard)
            path = self._paths.index(shard)
            table, facts = read_index(path)
            if facts.get("identity") != self.manifest.identity_hash:
                raise IncompatibleCacheError(
                    f"{path}: it belongs to a capture with other settings than the manifest's; run "
                    "the capture again, which redoes this shard alone"
                )
            if table["sample"].to_pylist() != list(rows):
                raise IncompatibleCacheError(
                    f"{path}: it does not list dataset rows {rows.start} to {rows.stop - 1}; "
                    "delete this file and run the capture again, which redoes this shard alone"
                )
            where = slice(rows.start, rows.stop)
            ok = np.asarray([s == OK for s in table["status"].to_pylist()], bool)
            limit: int | np.ndarray = self.manifest.max_length
            for name, column in (
                ("length", self.lengths),
                ("image_tokens", self.image_tokens),
                ("loss_tokens", self.loss_tokens),
            ):
                counts = table[name].fill_null(-1).to_numpy()
                if ((counts < 0) | (counts > limit))[ok].any():
                    raise IncompatibleCacheError(
                        f"{path}: a row's {name} is beyond what fits in it; delete this file and "
                        "run the capture again, which redoes this shard alone"
                    )
                column[where] = np.where(ok, counts, 0)
                limit = self.lengths[where]
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._file = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers of a data loader open the files on their own.
        return type(self), (self.root.absolute(),)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shard files. The next read opens them again."""
        self._file.cache_clear()

    def __len__(self) -> int:
        """M: rows of the dataset, skipped ones included."""
        return self.manifest.num_samples

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        """The stored tensors of a dataset row, real tokens only.

        Returns:
            ``[L, …]`` per field (``[3, L]`` for mRoPE positions), L being the row's length;
            empty for a skipped row.
        """
        sample = index(sample)  # numpy's integers are narrow
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of a cache of {len(self)}")
        sample %= len(self)
        length = int(self.lengths[sample])
        out = {}
        for field in self.manifest.fields:
            shape = list(field.row_shape)
            shape[field.token_axis] = length
            out[field.name] = torch.empty(shape, dtype=torch_dtype(field.dtype))
            self.read_row(sample, field, out[field.name])
        return out

    def field(self, name: str) -> Field:
        """The stored field of that name.

        Raises:
            IncompatibleCacheError: the cache does not hold it.
        """
        field = self.manifest.field(name)
        if field is None:
            raise IncompatibleCacheError(
                f"{self.root}: the cache has no field {name!r}; it has "
                + ", ".join(f.name for f in self.manifest.fields)
            )
        return field

    def read_row(self, sample: int, field: Field, out: Tensor) -> int:
        """Read the real tokens of one field of one row into ``out``.

        Args:
            sample: dataset row.
            field: a field of the manifest.
            out: contiguous CPU tensor of the field's type and of ``row_shape`` with any number of
                tokens, at least the row's length; positions beyond the length are left alone.

        Returns:
            Bytes read.

        Raises:
            IncompatibleCacheError: the shard file is missing or shorter than it must be.
        """
        sample = index(sample)
        shard, row = divmod(sample, self.manifest.rows_per_shard)
        length = int(self.lengths[sample])
        data = out.view(torch.uint8).numpy().reshape(-1) if out.numel() else np.empty(0, np.uint8)
        extents = self._layout.row_extents(field, row, length)
        stride = data.size // len(extents)
        file = self._file(shard)
        for i, (offset, size) in enumerate(extents):
            _read_fully(file, data[i * stride : i * stride + size], offset)
        return sum(size for _, size in extents)

    def _open_shard(self, shard: int) -> FileIO:
        path = self._paths.shard(shard)
        try:
            file = FileIO(path)
        except OSError as error:
            raise IncompatibleCacheError(
                f"{path}: {error.strerror}; {self._way_out(shard)}"
            ) from None
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), len(self._layout.header), 0)
        if size != self._layout.file_size or header != self._layout.header:
            raise IncompatibleCacheError(
                f"{path}: not the shard that the manifest describes ({size} bytes, "
                f"{self._layout.file_size} expected, or another header); {self._way_out(shard)}"
            )
        return file

    def _way_out(self, shard: int) -> str:
        return f"delete its index file {self._paths.index(shard)} and run the capture again"


def _read_fully(file: FileIO, out: np.ndarray, offset: int) -> None:
    done = 0
    while done < out.size:
        count = os.preadv(file.fileno(), [out[done:].data], offset + done)
        if count == 0:
            raise IncompatibleCacheError(f"{file.name!s}: ends before byte {offset + out.size}")
        done += count


def open_cache(path: str | os.PathLike[str]) -> Cache:
    """Open a finished cache for reading.

    Raises:
        IncompatibleCacheError: ``path`` is no cache, or an unfinished or damaged one.
    """
    return Cache(Path(path))


def ok_rows(cache: Cache) -> np.ndarray:
    """Dataset rows (int64) that hold a sample."""
    return np.flatnonzero(cache.lengths > 0)


def require_fields(cache: Cache, names: Sequence[str], arch: str) -> list[Field]:
    """The fields a draft reads, checked before anything else.

    Raises:
        IncompatibleCacheError: one is missing; the message says how to capture it.
    """
    missing = [name for name in names if cache.manifest.field(name) is None]
    if missing:
        raise IncompatibleCacheError(
            f"{cache.root}: draft {arch!r} needs {', '.join(missing)}, which this cache does not "
            "hold; capture again with --layers auto, or with --layers naming those layers"
        )
    return [cache.field(name) for name in names]
