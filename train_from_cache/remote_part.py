"""One part of a cache at a URL (see ``part``): rows of what was fetched, and of what was not."""

from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from dspark.remote.ahead import FetchAhead
from dspark.remote.mirror import Mirror
from dspark.schemas.columns import Columns
from dspark.schemas.errors import DamagedError, IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.file_reads import read_fully
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.part import Part


class RemotePart(Part):
    """One file or group of each shard at a URL. A field of a shard that was fetched is read from
    its file here; a row of any other is read from there, and compared with its digest.

    Args and errors are those of ``Part``, and:
        mirror: of the cache.

    Attributes:
        ahead: what fetches shards meanwhile, if anything.
    """

    def __init__(
        self,
        paths: CachePaths,
        manifest: Manifest,
        columns: Columns,
        *,
        mirror: Mirror,
        open_files: int,
        **how: Any,
    ) -> None:
        super().__init__(paths, manifest, columns, open_files=open_files, **how)
        self.way_out = "delete this file, and it is fetched once more"
        self._mirror = mirror
        self.ahead: FetchAhead | None = None
        self._layouts = {field.name: mirror.layout(field.name) for field in manifest.fields}
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._unit = lru_cache(maxsize=open_files)(self._open_unit)

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        super().close()
        self._unit.cache_clear()

    def read_row(self, sample: int, field: Field, out: memoryview) -> int:
        """See ``Part.read_row``."""
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self._lengths[sample])
        if not length:
            return 0
        extents = self._layouts[field.name].row_extents(field, row, length)
        stride = len(out) // len(extents)
        runs = [out[i * stride : i * stride + size] for i, (_, size) in enumerate(extents)]
        try:
            file = self._unit(field.name, shard)
        except _NotHereError:
            self._mirror.field(field.name, shard).read(
                self._mirror.rows(field.name, shard)[row], runs
            )
            return sum(map(len, runs))
        path = Path(str(file.name))
        try:
            for run, (offset, _) in zip(runs, extents, strict=True):
                read_fully(file.fileno(), run, offset, path)
        except DamagedError as error:
            raise IncompatibleCacheError(
                f"{path}: {field.name} of dataset row {sample} is damaged: {error.problem}; "
                + self.way_out
            ) from None
        if self._check_digests:
            self._check(field, shard, row, runs)
        return sum(map(len, runs))

    def will_read(self, sample: int, field: Field) -> None:
        """Shards are fetched ahead, in an order of their own (see ``FetchAhead``), so nothing."""

    def _index(self, shard: int) -> pa.Table:
        return self._mirror.index(self.fields[0].name, shard)

    def _file_of(self, field: Field, shard: int) -> Path:
        return self._mirror.unit(field.name, shard)

    def _open_unit(self, field: str, shard: int) -> FileIO:
        file = self._mirror.open_unit(field, shard)
        if file is None and self.ahead is not None:
            self.ahead.wait(field, shard)
            file = self._mirror.open_unit(field, shard)
        if file is None:
            raise _NotHereError
        return file


class _NotHereError(Exception):
    """A field of a shard was not fetched."""
