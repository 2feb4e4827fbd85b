"""A cache opens without its sample indexes; each is looked at when its shard is."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import cut
from synthetic_cache import add_extension, with_columns, write_cache

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths, columns_path, index_dir
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.rows import Rows

SHARDS = 5


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", samples=40, shards=SHARDS, layers=(0, 1))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Collect the files that are opened by Python and by pyarrow's Python files."""
    names: list[str] = []
    on = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if on and event == "open":
            names.append(str(args[0]))

    sys.addaudithook(hook)
    yield names
    on = False


@pytest.mark.parametrize("check_digests", [False, True])
def test_only_the_indexes_of_shards_that_are_read_are_opened(
    cache: Path, check_digests: bool
) -> None:
    add_extension(cache, layers=(2,))
    rows = read_manifest(cache).rows_of(3)
    with opened_files() as names:
        opened = open_cache(cache, check_digests=check_digests)
        assert len(ok_rows(opened)) == 35
        at_once = [name for name in names if name.endswith(".parquet")]
        for row in rows:
            assert len(opened[row]["input_ids"]) == opened.lengths[row]
    assert at_once == []
    stems = {Path(name).name for name in names if name.endswith(".parquet")}
    assert stems == {f"shard-00003-of-00005{plus}.parquet" for plus in ("", ".plus1")}


def test_opening_needs_as_many_files_whatever_the_shards(tmp_path: Path) -> None:
    counts = []
    for shards in (2, 40):
        root = write_cache(tmp_path / str(shards), samples=40, shards=shards, layers=())
        for path in index_dir(root).glob("*.parquet"):
            path.unlink()
        with opened_files() as names:
            open_cache(root)
        counts.append(len([name for name in names if str(root) in name]))
    assert counts[0] == counts[1] < 6


def test_a_shard_without_a_sound_index_does_not_exist(cache: Path) -> None:
    paths = CachePaths(cache, SHARDS)
    opened = open_cache(cache)
    paths.index(1).unlink()
    cut(paths.index(2))
    paths.index(3).write_bytes(b"")
    assert len(opened[0]["input_ids"])
    for shard in (1, 2, 3):
        row = int(opened.manifest.rows_of(shard).start)
        words = f"{paths.index(shard)}: this sample index is missing or damaged, so its shard"
        with pytest.raises(IncompatibleCacheError, match=re.escape(words)) as error:
            opened[row]
        assert "--repair" in str(error.value)


@pytest.mark.parametrize("check_digests", [False, True])
def test_an_index_that_says_otherwise_than_the_columns(cache: Path, check_digests: bool) -> None:
    paths, manifest = CachePaths(cache, SHARDS), read_manifest(cache)
    table, facts = read_index(paths, manifest, 1)
    rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist()]
    rows[0] = replace(rows[0], image_tokens=0)
    write_index(paths.index(1), rows, facts)
    opened = open_cache(cache, check_digests=check_digests)
    if not check_digests:
        assert len(opened[8]["input_ids"])  # the columns count
        return
    with pytest.raises(IncompatibleCacheError, match=r"\.parquet: it lists other rows than colu"):
        opened[8]


def test_columns_are_those_of_every_row(cache: Path) -> None:
    opened = open_cache(cache)
    paths = CachePaths(cache, SHARDS)
    entries = [
        entry
        for shard in range(SHARDS)
        for entry in read_index(paths, opened.manifest, shard)[0].to_pylist()
    ]
    assert opened.lengths.tolist() == [e["length"] for e in entries]
    assert opened.image_tokens.tolist() == [e["image_tokens"] for e in entries]
    assert opened.loss_tokens.tolist() == [e["loss_tokens"] for e in entries]
    assert list(ok_rows(opened)) == [e["sample"] for e in entries if e["status"] == "ok"]


def test_columns_are_not_held_in_memory(cache: Path) -> None:
    mapped = f"{columns_path(cache)}"
    opened = open_cache(cache)
    assert mapped in Path("/proc/self/maps").read_text()
    assert type(opened.lengths) is np.ndarray
    assert not opened.lengths.flags.owndata
    assert with_columns(cache)  # replaced meanwhile, the old file is still there for who has it
    assert opened.lengths.sum() == opened.manifest.counts.tokens


def test_rows_are_what_a_list_of_them_would_be() -> None:
    numbers = [row for row in range(1000) if row % 7 == 3 or row > 900]
    rows = Rows(1000, 33, lambda some: some % 7 != 8).where(
        lambda some: (some % 7 == 3) | (some > 900)
    )
    assert list(rows) == np.asarray(rows).tolist() == numbers
    assert len(rows) == len(numbers)
    assert [rows[i] for i in range(-len(rows), len(rows))] == numbers * 2
    for piece in (slice(3, 60, 7), slice(None, None, 2), slice(-5, None), slice(400, 10, -9)):
        assert rows[piece] == numbers[piece]
    for place in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[place]
    assert not Rows(10, 3, lambda some: some < 0)
    assert rows.counts.tolist() == [
        sum(row // 33 == shard for row in numbers) for shard in range(31)
    ]
    assert np.concatenate([rows.of_shard(shard) for shard in range(31)]).tolist() == numbers
