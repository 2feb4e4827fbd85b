"""The columns of all indexes in one file: what they hold, and what is refused."""

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from damage import cut, into_folder, lock_out, spoil
from safetensors.numpy import load_file
from synthetic_cache import write_cache

from dspark.schemas.columns import (
    NAMES,
    columns_are_sound,
    columns_layout,
    read_columns,
    write_columns,
)
from dspark.schemas.commands import NOT_RECORDED, capture_command
from dspark.schemas.digest import file_digest
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.index import read_index
from dspark.schemas.manifest import Counts, Manifest, read_manifest
from dspark.schemas.paths import CachePaths, columns_path

START = len(columns_layout(1).header)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", samples=50, shards=7)


def test_it_is_a_safetensors_file_with_what_the_indexes_say(cache: Path) -> None:
    manifest, paths = read_manifest(cache), CachePaths(cache, 7)
    tables = [pq.read_table(paths.index(shard)) for shard in range(7)]
    stored = load_file(columns_path(cache))
    columns = read_columns(cache, manifest)
    assert sorted(stored) == sorted(NAMES)
    for name in NAMES:
        expected = [n for table in tables for n in table[name].to_pylist()]
        assert stored[name].dtype == np.int32
        assert stored[name].tolist() == getattr(columns, name).tolist() == expected
    assert file_digest(columns_path(cache)) == manifest.columns
    assert columns_are_sound(cache, manifest)


def test_columns_cannot_be_written_to(cache: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        read_columns(cache, read_manifest(cache)).length[0] = 1


@pytest.mark.parametrize("samples", [1, 2, 1023, 1024, 1025])
def test_equal_indexes_give_equal_files_whatever_their_shards(tmp_path: Path, samples: int) -> None:
    written = set()
    for shards in {1, 2, min(samples, 100)}:
        root = write_cache(
            tmp_path / str(shards), samples=samples, shards=shards, max_length=8, layers=()
        )
        written.add(columns_path(root).read_bytes())
    assert len(written) == 1


def test_a_failure_on_the_way_leaves_the_file_that_was_there(cache: Path) -> None:
    manifest = read_manifest(cache)
    CachePaths(cache, 7).index(4).unlink()
    tables = (read_index(CachePaths(cache, 7), manifest, shard)[0] for shard in range(7))
    before = sorted(os.listdir(cache / "index"))
    with pytest.raises(IncompatibleCacheError, match="shard-00004"):
        write_columns(cache, 50, tables)
    assert sorted(os.listdir(cache / "index")) == before
    assert columns_are_sound(cache, manifest)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "No such file or directory"),
        (cut, "damaged: 4,695 bytes long, 4,696 expected"),
        (spoil, "damaged: its bytes do not have the digest of the manifest"),
        (into_folder, "not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
    ],
)
def test_damage_is_named_with_the_way_out(
    cache: Path, damage: Callable[[Path], None], words: str
) -> None:
    manifest = read_manifest(cache)
    damage(columns_path(cache))
    away = "move it away, and " if columns_path(cache).is_dir() else ""
    assert not columns_are_sound(cache, manifest)
    with pytest.raises(IncompatibleCacheError) as error:
        read_columns(cache, manifest)
    assert str(error.value) == (
        f"{columns_path(cache)}: {words}; {away}this writes it anew ({NOT_RECORDED} must be given "
        f"again if they were): {capture_command(cache, manifest)}"
    )


def test_what_cannot_be_read_may_be_sound(cache: Path) -> None:
    manifest = read_manifest(cache)
    lock_out(columns_path(cache))
    with pytest.raises(UnreadableError, match="may be sound"):
        read_columns(cache, manifest)
    with pytest.raises(OSError):
        columns_are_sound(cache, manifest)


def forged(root: Path, change: Callable[[np.ndarray], None]) -> Manifest:
    """Change the columns, int32 ``[3, M]``; the manifest that has their digest."""
    columns = np.memmap(columns_path(root), "<i4", "r+", START, (3, 50))
    change(columns)
    columns.flush()
    return replace(read_manifest(root), columns=file_digest(columns_path(root)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.__setitem__((0, 3), -1), "the length of dataset row 3 is not what a row can"),
        (lambda c: c.__setitem__((0, 3), 33), "the length of dataset row 3 is not what a row can"),
        (lambda c: c.__setitem__((0, 3), 2**31 - 1), "the length of dataset row 3 is not"),
        (lambda c: c.__setitem__((1, 49), c[0, 49] + 1), "the image_tokens of dataset row 49 is"),
        (lambda c: c.__setitem__((1, 49), -1), "the image_tokens of dataset row 49 is"),
        (lambda c: c.__setitem__((2, 0), c[0, 0] + 1), "the loss_tokens of dataset row 0 is"),
        (lambda c: c.__setitem__((2, 0), c[2, 0] - 1), "its sums are not the counts"),
        (lambda c: c.__setitem__((0, 6), 1), "its sums are not the counts"),
        (lambda c: c.__setitem__((slice(None), 1), 0), "its sums are not the counts"),
    ],
)
def test_numbers_that_cannot_be_are_refused_though_the_digest_is_right(
    cache: Path, change: Callable[[np.ndarray], None], words: str
) -> None:
    manifest = forged(cache, change)
    with pytest.raises(IncompatibleCacheError, match=f"damaged: {words}"):
        read_columns(cache, manifest)


def test_a_header_of_another_file_is_refused_though_the_digest_is_right(cache: Path) -> None:
    path = columns_path(cache)
    path.write_bytes(path.read_bytes().replace(b'"I32"', b'"U32"'))
    manifest = replace(read_manifest(cache), columns=file_digest(path))
    with pytest.raises(IncompatibleCacheError, match="its header is not the one"):
        read_columns(cache, manifest)


def test_memory_does_not_grow_with_the_rows(cache: Path) -> None:
    rows = 20_000_000
    layout = columns_layout(rows)
    with open(columns_path(cache), "wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_size)
    manifest = replace(
        read_manifest(cache),
        num_samples=rows,
        rows_per_shard=-(-rows // 7),
        counts=Counts(0, {"too_long": rows}),
        columns=file_digest(columns_path(cache)),
    )
    tracemalloc.start()
    columns = read_columns(cache, manifest)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(columns.length) == rows
    assert held < 1 << 20
    assert peak < 40 << 20
