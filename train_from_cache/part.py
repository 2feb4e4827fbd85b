"""The files of one part of a cache (see ``schemas.parts``): its indexes, and its rows."""

import os
from collections.abc import Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.schemas.digest import field_digest
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.durable import names
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.fields import Field
from dspark.schemas.index import read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout


class Part:
    """One file of each shard, opened when it is first read.

    Args:
        paths: of the files.
        manifest: of the part.
        way_out: what to do where one of them is damaged.
        check_digests: compare each field of a row with its digest whenever it is read.
        open_files: most files that are open at once.

    Raises:
        IncompatibleCacheError: an index is missing or damaged.

    Attributes:
        fields: that the files hold.
        way_out: see above.
        lengths: int32 ``[M]``, stored tokens of each dataset row, 0 where it was skipped.
        image_tokens: int32 ``[M]``, positions of each row that a picture fills.
        loss_tokens: int32 ``[M]``, supervised positions of each row.
    """

    def __init__(
        self,
        paths: CachePaths,
        manifest: Manifest,
        *,
        way_out: str,
        check_digests: bool,
        open_files: int,
    ) -> None:
        self.fields = manifest.fields
        self._rows_per_shard = manifest.rows_per_shard
        self._layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
        self.way_out = way_out
        self._digests: np.ndarray | None = None
        self._read_indexes(paths, manifest, check_digests)
        # Files are opened late, perhaps from another working directory.
        self._paths = CachePaths(paths.root.absolute(), paths.num_shards, paths.part)
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._file = lru_cache(maxsize=open_files)(self._open_shard)

    def _read_indexes(self, paths: CachePaths, manifest: Manifest, check_digests: bool) -> None:
        # What is allocated follows from what is found, not from what the manifest says.
        columns: dict[str, list[np.ndarray]] = {"length": [], "image_tokens": [], "loss_tokens": []}
        digests: list[np.ndarray] = []
        for shard in range(manifest.num_shards):
            table, _ = read_index(paths, manifest, shard)
            for name, arrays in columns.items():
                arrays.append(table[name].to_numpy())
            if check_digests:
                digests.append(table["digests"].combine_chunks().flatten().to_numpy())
        self.lengths, self.image_tokens, self.loss_tokens = map(np.concatenate, columns.values())
        if check_digests:
            self._digests = np.zeros((len(self.lengths), len(self.fields)), np.uint64)
            held = self.lengths > 0
            self._digests[held] = np.concatenate(digests).reshape(-1, len(self.fields))

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        self._file.cache_clear()

    def read_row(self, sample: int, field: Field, out: Tensor) -> int:
        """Read the real tokens of one of the part's fields; see ``Cache.read_row``."""
        shard, row = divmod(sample, self._rows_per_shard)
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
                    + self.way_out
                )
        if self._digests is not None and length:
            self._check(sample, field, runs, int(self._digests[sample, self.fields.index(field)]))
        return sum(size for _, size in extents)

    def _check(self, sample: int, field: Field, runs: Sequence[np.ndarray], digest: int) -> None:
        if field_digest(*(run.data for run in runs)) != digest:
            raise IncompatibleCacheError(
                f"{self._paths.shard(sample // self._rows_per_shard)}: {field.name} of dataset row "
                f"{sample} is damaged: its bytes do not have the digest of the index; "
                + self.way_out
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
            raise unusable(path, error, self.way_out) from None
        if not sound:
            raise IncompatibleCacheError(
                f"{path}: not the shard that the manifest describes ({size} bytes, "
                f"{self._layout.file_size} expected, or another header); {self.way_out}"
            )
        return file


def unusable(path: Path, error: OSError, way_out: str) -> IncompatibleCacheError:
    """What a failure to open or read a file of a cache is told as; ``way_out`` is of damage."""
    if is_unreadable(error):
        return UnreadableError(path, error)
    return IncompatibleCacheError(f"{path}: {error.strerror}; {way_out}")


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
