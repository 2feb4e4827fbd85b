"""Writing a shard in its zarr form: collected as safetensors, turned into a group at the end."""

from collections.abc import Callable

from torch import Tensor

from dspark.capture.shard_writer import ShardWriter, WrittenRow
from dspark.schemas.copy_shard import write_zarr
from dspark.schemas.durable import tmp_path
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.safetensors_shard import SafetensorsShard
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes
from dspark.schemas.stored_shard import zarr_layout


def shard_writer(
    paths: CachePaths,
    manifest: Manifest,
    layout: ShardLayout,
    shard: int,
    is_committed: Callable[[], bool],
) -> ShardWriter:
    """Claim a shard, and write it in the form of its cache.

    Args:
        paths: of the part that is written.
        manifest: of that part.
        layout: of its safetensors files.
        shard: its number.
        is_committed: see ``ShardWriter``.

    Raises:
        ClaimedError: another live process has claimed the shard, or finished it meanwhile.
    """
    if manifest.shard_format.is_zarr:
        return ZarrShardWriter(paths, manifest, layout, shard, is_committed)
    return ShardWriter(paths.shard(shard), layout, is_committed)


class ZarrShardWriter(ShardWriter):
    """A ``ShardWriter`` whose temporary file never gets its name: ``commit`` writes the group."""

    _file_stays = False

    def __init__(
        self,
        paths: CachePaths,
        manifest: Manifest,
        layout: ShardLayout,
        shard: int,
        is_committed: Callable[[], bool],
    ) -> None:
        super().__init__(paths.shard(shard), layout, is_committed)
        self._group = paths.group(shard)
        self._collected = tmp_path(paths.shard(shard))
        self._manifest = manifest
        self._first_sample = manifest.rows_of(shard).start
        self._rows: list[RowBytes] = []

    def write_row(self, row: int, tensors: dict[str, Tensor]) -> WrittenRow:
        """See ``ShardWriter.write_row``."""
        written = super().write_row(row, tensors)
        field = self._layout.fields[0]
        length = tensors[field.name].shape[field.token_axis]
        self._rows.append(RowBytes(self._first_sample + row, row, length, written.digests))
        return written

    def commit(self) -> None:
        """Make the group durable; its own metadata, written last, publish it."""
        rows = sorted(self._rows, key=lambda row: row.row)
        with SafetensorsShard(self._collected, self._layout) as collected:
            write_zarr(self._group, zarr_layout(self._manifest), collected, self._manifest, rows)
