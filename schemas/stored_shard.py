"""The files of a shard, in either form: whether they are there, and what rows they hold."""

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from dspark.schemas.durable import fsync_dir
from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.index import index_identity
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.safetensors_shard import SafetensorsShard
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.zarr_layout import METADATA, ZarrLayout
from dspark.schemas.zarr_shard import ZarrShard


class StoredShard(Protocol):
    """One part of a shard, open for reading. May be used by several threads at once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...

    def read_into(self, field: Field, row: int, length: int, runs: Sequence[memoryview]) -> None:
        """Read the real tokens of a field of a row.

        Args:
            field: one of the part's.
            row: row of the shard.
            length: its stored tokens, at least 1.
            runs: where the bytes go: a view of bytes for each run of ``Field.extents``.

        Raises:
            DamagedError: they are not what was written.
            OSError: they cannot be read.
        """

    def pieces(self, field: Field, row: int, length: int) -> Iterator[memoryview]:
        """The same bytes, run after run, in pieces of whole numbers, each valid until the next."""

    def close(self) -> None:
        """Close the files."""


def open_shard(paths: CachePaths, manifest: Manifest, shard: int) -> StoredShard:
    """Open one part of a shard; what is damaged or missing may show only when it is read.

    Args:
        paths: of the part.
        manifest: of the part.
        shard: its number.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    if manifest.shard_format.is_zarr:
        return ZarrShard(paths.group(shard), zarr_layout(manifest))
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    return SafetensorsShard(paths.shard(shard), layout)


def zarr_layout(manifest: Manifest) -> ZarrLayout:
    """The layout of the groups of a part."""
    return ZarrLayout(manifest.fields, manifest.rows_per_shard, manifest.shard_format)


def shard_files(paths: CachePaths, manifest: Manifest, shard: int) -> list[Path]:
    """The files of one part of a shard; of a group its own metadata is the last."""
    if manifest.shard_format.is_zarr:
        return [paths.group(shard) / name for name in zarr_layout(manifest).objects]
    return [paths.shard(shard)]


def shard_place(paths: CachePaths, manifest: Manifest, shard: int) -> Path:
    """What stands for one part of a shard: its file, or its group."""
    return paths.group(shard) if manifest.shard_format.is_zarr else paths.shard(shard)


def is_committed(manifest: Manifest, paths: CachePaths, shard: int) -> bool:
    """Whether a shard has an index of this identity, and data that is neither missing nor cut."""
    identity = index_identity(paths.index(shard))
    return identity == manifest.identity_hash and is_whole(paths, manifest, shard)


def is_whole(paths: CachePaths, manifest: Manifest, shard: int) -> bool:
    """Whether the files of one part of a shard are neither missing nor cut."""
    try:
        if not manifest.shard_format.is_zarr:
            found = paths.shard(shard).stat()
            return stat.S_ISREG(found.st_mode) and found.st_size == manifest.shard_bytes
        layout = zarr_layout(manifest)
        with ZarrShard(paths.group(shard), layout) as group:
            for name in layout.arrays:
                group.array(name)
    except (DamagedError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return True


def remove_shard(paths: CachePaths, manifest: Manifest, shard: int) -> None:
    """Remove the files of one part of a shard durably."""
    if manifest.shard_format.is_zarr:
        remove_group(paths.group(shard))
        return
    path = paths.shard(shard)
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        fsync_dir(path.parent)


def remove_group(folder: Path) -> None:
    """Remove a zarr group durably: first its own metadata, without which it is none."""
    if not folder.is_dir():
        return
    (folder / METADATA).unlink(missing_ok=True)
    fsync_dir(folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()
    fsync_dir(folder.parent)
