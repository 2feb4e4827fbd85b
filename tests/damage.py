"""Damage done to a cache, and numbers replaced in it."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import dspark
from dspark.schemas.digest import field_digest
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout


def cut(path: Path) -> None:
    """Take the last byte away."""
    os.truncate(path, path.stat().st_size - 1)


def spoil(path: Path) -> None:
    """Change a byte of the head."""
    path.write_bytes(path.read_bytes()[:9] + b"?" + path.read_bytes()[10:])


def into_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def lock_out(path: Path) -> None:
    """Make a file one that cannot be opened."""
    path.unlink()
    path.symlink_to(path.name)


def into_file(path: Path) -> None:
    """Put a file in the place of a folder."""
    shutil.rmtree(path)
    path.touch()


def rewrite(root: Path, sample: int, name: str, numbers: Any, *, digest: bool) -> None:
    """Store other numbers as a field of a row, with or without the digest that they have."""
    manifest = read_manifest(root)
    shard, row = divmod(sample, manifest.rows_per_shard)
    paths = CachePaths(root, manifest.num_shards)
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    table, facts = read_index(paths, manifest, shard)
    entries = table.to_pylist()
    field = manifest.field(name)
    assert field is not None
    data = np.ascontiguousarray(numbers).tobytes()
    with open(paths.shard(shard), "r+b") as file:
        start = 0
        for offset, size in layout.row_extents(field, row, entries[row]["length"]):
            file.seek(offset)
            file.write(data[start : start + size])
            start += size
    assert start == len(data)
    if digest:
        entries[row]["digests"][manifest.fields.index(field)] = field_digest(data)
        rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in entries]
        write_index(paths.index(shard), rows, facts)


def stored(root: Path, sample: int) -> dict[str, np.ndarray]:
    """The numbers of a row of an fp32 cache."""
    return {k: v.numpy().copy() for k, v in dspark.open_cache(root)[sample].items()}
