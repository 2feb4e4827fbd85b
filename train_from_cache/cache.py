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

from dspark.schemas.commands import NOT_RECORDED, capture_command, repair_command
from dspark.schemas.digest import field_digest, file_digest
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.durable import names
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.fields import Field
from dspark.schemas.index import read_index
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.options import check_given
from dspark.schemas.paths import CachePaths, target_dir
from dspark.schemas.shard_layout import ShardLayout

_OPEN_SHARDS = 256


class Cache:
    """A finished cache. ``cache[i]`` gives the stored tensors of dataset row ``i``.

    Args:
        root: the cache directory.
        check_digests: compare all that is read with its digest: the files of ``target/`` now, each
            field of a row whenever it is read.

    Raises:
        IncompatibleCacheError: ``root`` is no cache, or an unfinished or damaged one.

    Attributes:
        root: the cache directory.
        manifest: what is stored and how.
        lengths: int32 ``[M]``, stored tokens of each dataset row, 0 where it was skipped.
        image_tokens: int32 ``[M]``, positions of each row that a picture fills.
        loss_tokens: int32 ``[M]``, supervised positions of each row.
        check_digests: whether what is read is compared with its digest.
    """

    def __init__(self, root: Path, check_digests: bool = False) -> None:
        self.root = root
        self.manifest: Manifest = read_manifest(root)
        if not self.manifest.complete:
            raise IncompatibleCacheError(
                f"{root}: the capture is not finished; this continues it with the missing shards "
                f"({NOT_RECORDED} must be given again if they were): "
                + capture_command(root, self.manifest)
            )
        # Files are opened late, perhaps from another working directory.
        self._paths = CachePaths(root.absolute(), self.manifest.num_shards)
        self._layout = ShardLayout(self.manifest.fields, self.manifest.rows_per_shard)
        self.check_digests = check_digests
        self._read_indexes(CachePaths(root, self.manifest.num_shards))
        if check_digests:
            self._check_target_files()
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._file = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    def _read_indexes(self, paths: CachePaths) -> None:
        # What is allocated follows from what is found, not from what the manifest says.
        columns: dict[str, list[np.ndarray]] = {"length": [], "image_tokens": [], "loss_tokens": []}
        digests: list[np.ndarray] = []
        for shard in range(self.manifest.num_shards):
            table, _ = read_index(paths, self.manifest, shard)
            for name, arrays in columns.items():
                arrays.append(table[name].to_numpy())
            if self.check_digests:
                digests.append(table["digests"].combine_chunks().flatten().to_numpy())
        self.lengths, self.image_tokens, self.loss_tokens = map(np.concatenate, columns.values())
        if self.check_digests:
            fields = len(self.manifest.fields)
            self._digests = np.zeros((len(self), fields), np.uint64)
            self._digests[self.lengths > 0] = np.concatenate(digests).reshape(-1, fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers of a data loader open the files on their own.
        return type(self), (self.root.absolute(), self.check_digests)

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

    def __repr__(self) -> str:
        target, fields = self.manifest.target.id, len(self.manifest.fields)
        return f"<Cache {str(self.root)!r} of {target!r}: {len(self):,} rows, {fields} fields>"

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
            IncompatibleCacheError: the shard file is missing or shorter than it must be, or digests
                are checked and the bytes do not have theirs.
        """
        sample = index(sample)
        shard, row = divmod(sample, self.manifest.rows_per_shard)
        length = int(self.lengths[sample])
        data = out.view(torch.uint8).numpy().reshape(-1) if out.numel() else np.empty(0, np.uint8)
        extents = self._layout.row_extents(field, row, length)
        stride = data.size // len(extents)
        file = self._file(shard)
        runs = [data[i * stride : i * stride + size] for i, (_, size) in enumerate(extents)]
        for run, (offset, _) in zip(runs, extents, strict=True):
            if not _read_fully(file, run, offset):
                raise IncompatibleCacheError(
                    f"{self._paths.shard(shard)}: ends before byte {offset + run.size}; "
                    + self._way_out()
                )
        if self.check_digests and length:
            self._check(sample, field, runs)
        return sum(size for _, size in extents)

    def _check(self, sample: int, field: Field, runs: Sequence[np.ndarray]) -> None:
        shard, _ = divmod(sample, self.manifest.rows_per_shard)
        found = field_digest(*(run.data for run in runs))
        if found != int(self._digests[sample, self.manifest.fields.index(field)]):
            raise IncompatibleCacheError(
                f"{self._paths.shard(shard)}: {field.name} of dataset row {sample} is damaged: its "
                f"bytes do not have the digest of the index; {self._way_out()}"
            )

    def _check_target_files(self) -> None:
        for name, file in self.manifest.target_files.items():
            path = target_dir(self.root) / name
            try:
                found = file_digest(path)
            except OSError as error:
                raise self._unusable(path, error) from None
            if found != file:
                raise IncompatibleCacheError(
                    f"{path}: damaged: its bytes do not have the digest of the manifest; "
                    + self._way_out()
                )

    def _open_shard(self, shard: int) -> FileIO:
        path = self._paths.shard(shard)
        try:
            file = FileIO(path, opener=_open_at_once)
            size = os.fstat(file.fileno()).st_size
            expected = self._layout.header
            sound = size == self._layout.file_size and (
                os.pread(file.fileno(), len(expected), 0) == expected
            )
        except OSError as error:
            raise self._unusable(path, error) from None
        if not sound:
            raise IncompatibleCacheError(
                f"{path}: not the shard that the manifest describes ({size} bytes, "
                f"{self._layout.file_size} expected, or another header); {self._way_out()}"
            )
        return file

    def _unusable(self, path: Path, error: OSError) -> IncompatibleCacheError:
        if is_unreadable(error):
            return UnreadableError(path, error)
        return IncompatibleCacheError(f"{path}: {error.strerror}; {self._way_out()}")

    def _way_out(self) -> str:
        return (
            f"run '{repair_command(self.root)}' and then the capture again, which redoes what is "
            "damaged and nothing else: " + capture_command(self.root, self.manifest)
        )


def _open_at_once(path: str, flags: int) -> int:
    """``os.open`` that does not wait where ``path`` is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_fully(file: FileIO, out: np.ndarray, offset: int) -> bool:
    """Fill ``out`` from ``offset`` of the file; False if the file ends before."""
    done = 0
    while done < out.size:
        with names(Path(str(file.name))):
            count = os.preadv(file.fileno(), [out[done:].data], offset + done)
        if count == 0:
            return False
        done += count
    return True


def open_cache(path: str | os.PathLike[str], *, check_digests: bool = False) -> Cache:
    """Open a finished cache for reading.

    Args:
        path: the cache directory.
        check_digests: compare all that is read with its digest, and raise where it differs.

    Raises:
        IncompatibleCacheError: ``path`` is no cache, or an unfinished or damaged one.
    """
    check_given(cache=path)
    return Cache(Path(path), check_digests)


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
