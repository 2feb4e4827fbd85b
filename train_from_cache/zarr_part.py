"""The objects of one part of a cache in zarr form (see ``part`` for the other form)."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.schemas.digest import field_digest
from dspark.schemas.errors import DamagedError, IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.stored_shard import zarr_layout
from dspark.schemas.zarr_shard import ZarrArray
from dspark.train_from_cache.part import Part, unusable


class ZarrPart(Part):
    """One group of each shard, of which each field's object is opened when it is first read.

    Args and errors are those of ``Part``; ``open_files`` counts objects.
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
        super().__init__(
            paths, manifest, way_out=way_out, check_digests=check_digests, open_files=open_files
        )
        self._zarr = zarr_layout(manifest)
        # An object that drops out of this cache is closed once no thread reads from it any more.
        self._array = lru_cache(maxsize=open_files)(self._open_array)

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        super().close()
        self._array.cache_clear()

    def read_row(self, sample: int, field: Field, out: Tensor) -> int:
        """Read the real tokens of one of the part's fields; see ``Cache.read_row``."""
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self.lengths[sample])
        if not length:
            return 0
        data = out.view(torch.uint8).numpy().reshape(-1)
        extents = field.extents(length)
        stride = data.size // len(extents)
        runs = [data[i * stride : i * stride + size] for i, (_, size) in enumerate(extents)]
        array = self._array(shard, field.name)
        try:
            array.read_into(row, length, [run.data for run in runs])
            if self._digests is not None:
                self._compare(array, runs, int(self._digests[sample, self.fields.index(field)]))
        except DamagedError as error:
            raise IncompatibleCacheError(
                f"{error.path}: {field.name} of dataset row {sample} is damaged: {error.problem}; "
                + self.way_out
            ) from None
        return sum(size for _, size in extents)

    def _compare(self, array: ZarrArray, runs: list[np.ndarray], digest: int) -> None:
        if field_digest(*(run.data for run in runs)) != digest:
            raise DamagedError(array.path, "its bytes do not have the digest of the index")

    def _open_array(self, shard: int, field: str) -> ZarrArray:
        folder = self._paths.group(shard)
        try:
            return ZarrArray(folder, self._zarr, field)
        except DamagedError as error:
            raise IncompatibleCacheError(f"{error}; {self.way_out}") from None
        except OSError as error:
            path = Path(error.filename or folder / self._zarr.arrays[field].object)
            raise unusable(path, error, self.way_out) from None
