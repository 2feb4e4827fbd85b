"""One part of a cache at a URL (see ``part``): rows of what was fetched, and of what was not."""

from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.remote.ahead import FetchAhead
from dspark.remote.mirror import Mirror
from dspark.schemas.digest import field_digest
from dspark.schemas.errors import DamagedError, IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.safetensors_shard import read_fully
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
        self, paths: CachePaths, manifest: Manifest, *, mirror: Mirror, open_files: int, **how: Any
    ) -> None:
        super().__init__(paths, manifest, open_files=open_files, **how)
        self._mirror = mirror
        self.ahead: FetchAhead | None = None
        self._layouts = {field.name: mirror.layout(field.name) for field in manifest.fields}
        # A file that drops out of this cache is closed once no thread reads from it any more.
        self._unit = lru_cache(maxsize=open_files)(self._open_unit)

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        super().close()
        self._unit.cache_clear()

    def read_row(self, sample: int, field: Field, out: Tensor) -> int:
        """Read the real tokens of one of the part's fields; see ``Cache.read_row``."""
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self.lengths[sample])
        if not length:
            return 0
        data = out.view(torch.uint8).numpy().reshape(-1)
        extents = self._layouts[field.name].row_extents(field, row, length)
        stride = data.size // len(extents)
        runs = [data[i * stride : i * stride + size].data for i, (_, size) in enumerate(extents)]
        try:
            file = self._unit(field.name, shard)
        except _NotHereError:
            self._mirror.field(field.name, shard).read(
                self._mirror.rows(field.name, shard)[row], runs
            )
            return sum(size for _, size in extents)
        path = Path(str(file.name))
        try:
            for run, (offset, _) in zip(runs, extents, strict=True):
                read_fully(file.fileno(), run, offset, path)
            if self._digests is not None:
                self._compare(path, runs, int(self._digests[sample, self.fields.index(field)]))
        except DamagedError as error:
            raise IncompatibleCacheError(
                f"{path}: {field.name} of dataset row {sample} is damaged: {error.problem}; "
                "delete this file, and it is fetched once more"
            ) from None
        return sum(size for _, size in extents)

    def _compare(self, path: Path, runs: list[memoryview], digest: int) -> None:
        if field_digest(*runs) != digest:
            raise DamagedError(path, "its bytes do not have the digest of the index")

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
