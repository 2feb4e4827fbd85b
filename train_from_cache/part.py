"""The files of one part of a cache (see ``schemas.parts``): its indexes, and its rows."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dspark.schemas.columns import Columns
from dspark.schemas.digest import field_digest
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.errors import DamagedError, IncompatibleCacheError, UnreadableError
from dspark.schemas.fields import Field
from dspark.schemas.file_reads import open_at_once, read_fully
from dspark.schemas.index import index_identity, read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths, columns_path
from dspark.schemas.shard_layout import ShardLayout

_HELD_DIGESTS = 32
"""Shards whose digests are held: those that a training reads from at once, and some more."""


class Part:
    """One file of each shard, opened when it is first read.

    Args:
        paths: of the files.
        manifest: of the part.
        columns: of the cache.
        way_out: what to do where one of them is damaged.
        check_digests: compare each field of a row with its digest whenever it is read.
        open_files: most files that are open at once.

    Attributes:
        fields: that the files hold.
        way_out: see above.
    """

    def __init__(
        self,
        paths: CachePaths,
        manifest: Manifest,
        columns: Columns,
        *,
        way_out: str,
        check_digests: bool,
        open_files: int,
    ) -> None:
        self.fields = manifest.fields
        self.way_out = way_out
        self._rows_per_shard = manifest.rows_per_shard
        self._layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
        # Of each run of a field: where it starts in row 0, the bytes of a row, those of a token.
        self._places = {
            field.name: [
                (start, field.row_bytes, token_bytes)
                for start, token_bytes in self._layout.row_extents(field, 0, 1)
            ]
            for field in manifest.fields
        }
        self._manifest = manifest
        self._identity = manifest.identity_hash
        target = manifest.target
        self._id_limits = {
            "input_ids": target.embedding_rows,
            "logits_topk.indices": target.vocab_size,
        }
        self._columns = columns
        self._lengths = np.asarray(columns.length)  # plain: a mapped array is slow to index
        self._check_digests = check_digests
        # Files are opened late, perhaps from another working directory.
        self._paths = CachePaths(paths.root.absolute(), paths.num_shards, paths.part)
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._file = lru_cache(maxsize=open_files)(self._open_shard)
        self._digests = lru_cache(maxsize=_HELD_DIGESTS)(self._read_digests)

    def _check_committed(self, shard: int) -> None:
        """Without an index of this capture, a shard does not exist.

        Raises:
            IncompatibleCacheError: it has none.
        """
        index = self._paths.index(shard)
        try:
            identity = index_identity(index)
        except OSError as error:
            raise UnreadableError(index, error) from None
        if identity != self._identity:
            problem = (
                "this sample index is missing or damaged, so its shard does not exist"
                if identity is None
                else "it belongs to a capture with other settings than the manifest's"
            )
            raise IncompatibleCacheError(f"{index}: {problem}; {self.way_out}")

    def entry(self, sample: int) -> dict[str, Any]:
        """What the index says of a dataset row.

        Raises:
            IncompatibleCacheError: the index is missing or damaged.
        """
        shard, row = divmod(sample, self._rows_per_shard)
        entries: list[dict[str, Any]] = self._index(shard).slice(row, 1).to_pylist()
        return entries[0]

    def _index(self, shard: int) -> pa.Table:
        return read_index(self._paths, self._manifest, shard)[0]

    def _read_digests(self, shard: int) -> np.ndarray:
        """uint64 ``[rows, fields]`` of a shard, 0 where a row was skipped; checks its index.

        Raises:
            IncompatibleCacheError: the index is missing or damaged, or says otherwise than the
                columns.
        """
        table = self._index(shard)
        rows = self._manifest.rows_of(shard)
        if not self._columns.are_those_of(table, rows):
            raise IncompatibleCacheError(
                f"{self._paths.index(shard)}: it lists other rows than "
                f"{columns_path(self._paths.root).name}; {self.way_out}"
            )
        digests = np.zeros((len(rows), len(self.fields)), np.uint64)
        stored = table["digests"].combine_chunks().flatten().to_numpy()
        digests[table["length"].to_numpy() > 0] = stored.reshape(-1, len(self.fields))
        return digests

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        self._file.cache_clear()
        self._digests.cache_clear()

    def read_row(self, sample: int, field: Field, out: memoryview) -> int:
        """Read the real tokens of one of the part's fields; see ``Cache.read_row``.

        Args:
            sample: dataset row.
            field: of the part.
            out: bytes of a row of the field with any number of tokens, at least the row's length;
                those beyond the length are left alone.

        Returns:
            Bytes read.
        """
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self._lengths[sample])
        places = self._places[field.name]
        stride = len(out) // len(places)
        file = self._file(shard)
        runs = []
        for i, (start, row_bytes, token_bytes) in enumerate(places):
            run = out[i * stride : i * stride + length * token_bytes]
            offset = start + row * row_bytes
            try:
                read_fully(file.fileno(), run, offset, str(file.name))
            except DamagedError as error:
                raise IncompatibleCacheError(f"{error}; {self.way_out}") from None
            runs.append(run)
        if self._check_digests and length:
            self._check(field, shard, row, runs)
        return sum(map(len, runs))

    def check_ids(self, sample: int, field: Field, data: memoryview) -> None:
        """Where a field is of ids, refuse those that a table does not have: to look them up would
        be a traceback, and on a GPU the end of the device's context.

        Args:
            sample: dataset row.
            field: of the part.
            data: of that row, and perhaps zeros after it.

        Raises:
            IncompatibleCacheError: there are such.
        """
        limit = self._id_limits.get(field.name)
        if limit is not None and np.frombuffer(data, "<u4").max(initial=0) >= limit:
            raise IncompatibleCacheError(
                f"{self._file_of(field, sample // self._rows_per_shard)}: {field.name} of dataset "
                f"row {sample} is damaged: it has ids that are not in 0..{limit - 1}; "
                + self.way_out
            )

    def will_read(self, sample: int, field: Field) -> None:
        """Let the system fetch what ``read_row`` of the same will read, and do not wait for it.

        Raises:
            IncompatibleCacheError: the shard cannot be opened.
        """
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self._lengths[sample])
        file = self._file(shard)
        for start, row_bytes, token_bytes in self._places[field.name]:
            offset, size = start + row * row_bytes, length * token_bytes
            with suppress(OSError):  # not every file system takes advice
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)

    def _check(self, field: Field, shard: int, row: int, runs: Sequence[memoryview]) -> None:
        """Compare the bytes of a field of a row with their digest."""
        digest = self._digests(shard)[row, self.fields.index(field)]
        if field_digest(*runs) != digest:
            raise IncompatibleCacheError(
                f"{self._file_of(field, shard)}: {field.name} of dataset row "
                f"{shard * self._rows_per_shard + row} is damaged: its bytes do not have the "
                f"digest of the index; {self.way_out}"
            )

    def _file_of(self, field: Field, shard: int) -> Path:
        """The file that holds a field of a shard."""
        return self._paths.shard(shard)

    def _open_shard(self, shard: int) -> FileIO:
        path = self._paths.shard(shard)
        self._check_committed(shard)
        try:
            file = FileIO(path, opener=open_at_once)
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
