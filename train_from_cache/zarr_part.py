"""The objects of one part of a cache in zarr form (see ``part`` for the other form)."""

from functools import lru_cache
from pathlib import Path

from dspark.schemas.columns import Columns
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
        columns: Columns,
        *,
        way_out: str,
        check_digests: bool,
        open_files: int,
    ) -> None:
        super().__init__(
            paths,
            manifest,
            columns,
            way_out=way_out,
            check_digests=check_digests,
            open_files=open_files,
        )
        self._zarr = zarr_layout(manifest)
        # An object that drops out of this cache is closed once no thread reads from it any more.
        self._array = lru_cache(maxsize=open_files)(self._open_array)

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        super().close()
        self._array.cache_clear()

    def read_row(self, sample: int, field: Field, out: memoryview) -> int:
        """See ``Part.read_row``."""
        shard, row = divmod(sample, self._rows_per_shard)
        length = int(self._lengths[sample])
        if not length:
            return 0
        sizes = [size for _, size in field.extents(length)]
        stride = len(out) // len(sizes)
        runs = [out[i * stride : i * stride + size] for i, size in enumerate(sizes)]
        array = self._array(shard, field.name)
        try:
            array.read_into(row, length, runs)
        except DamagedError as error:
            raise IncompatibleCacheError(
                f"{error.path}: {field.name} of dataset row {sample} is damaged: {error.problem}; "
                + self.way_out
            ) from None
        if self._check_digests:
            self._check(field, shard, row, runs)
        return sum(sizes)

    def will_read(self, sample: int, field: Field) -> None:
        """Where chunks lie is known only once the index of an object is read, so nothing."""

    def _file_of(self, field: Field, shard: int) -> Path:
        return self._paths.group(shard) / self._zarr.arrays[field.name].object

    def _open_array(self, shard: int, field: str) -> ZarrArray:
        self._check_committed(shard)
        folder = self._paths.group(shard)
        try:
            return ZarrArray(folder, self._zarr, field)
        except DamagedError as error:
            raise IncompatibleCacheError(f"{error}; {self.way_out}") from None
        except OSError as error:
            path = Path(error.filename or folder / self._zarr.arrays[field].object)
            raise unusable(path, error, self.way_out) from None
