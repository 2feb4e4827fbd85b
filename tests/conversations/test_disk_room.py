"""A disk that is clearly too small is refused before the first forward."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversation_data import mixed_rows, write_rows
from mounts import ext4, tmpfs

import dspark
from dspark.capture.disk_room import evenly_spaced, free_bytes, keeps_holes
from dspark.schemas.errors import InputError


def test_refused_with_both_numbers(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(40))
    options = {"target": str(tiny_target("llava")), "data": str(data)}
    report = dspark.capture(2, **options, out=str(tmp_path / "whole"))
    needed = report.bytes_written
    asked: list[Path] = []

    def disk(free: float) -> None:
        def usage(path: Path) -> SimpleNamespace:
            asked.append(path)
            return SimpleNamespace(free=int(free))

        monkeypatch.setattr(shutil, "disk_usage", usage)

    disk(needed / 2)
    with pytest.raises(InputError) as error:
        dspark.capture(2, **options, out=str(tmp_path / "a" / "b"))
    words = str(error.value).split()
    assert float(words[words.index("about") + 1]) == pytest.approx(needed / 1e6, rel=0.2)
    assert float(words[words.index("and") + 1]) == pytest.approx(needed / 2e6, rel=0.1)
    assert asked[-1] == tmp_path
    assert not (tmp_path / "a").exists()
    disk(needed)  # as much as is needed, by an estimate from a few rows
    assert dspark.capture(2, **options, out=str(tmp_path / "a")).shards_written == 2
    disk(0)  # nothing is left to write
    assert dspark.capture(2, **options, out=str(tmp_path / "a")).shards_written == 0


def test_padding_needs_room_where_there_are_no_holes(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """A disk whose smallest piece is 4 MiB has no smaller hole."""
    rows = 160
    data = write_rows(tmp_path / "d.parquet", mixed_rows(rows))
    options = {"target": str(tiny_target("llava")), "data": str(data)}
    report = dspark.capture(2, **options, limit=2, out=str(tmp_path / "two"))
    padded = rows * report.manifest.shard_bytes
    disk = tmp_path / "disk"
    with ext4(disk, 256 << 20, "-O", "bigalloc", "-C", str(4 << 20)):
        assert not keeps_holes(disk / "cache")
        with open(disk / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free_bytes(disk) - padded // 2)
        assert report.bytes_written / 2 * rows < free_bytes(disk) < padded
        with pytest.raises(InputError, match="keeps no holes, so padding takes room"):
            dspark.capture(2, **options, out=str(disk / "cache"))
        assert not (disk / "cache").exists()
    with tmpfs(tmp_path / "memory", 1 << 22) as memory:
        assert keeps_holes(memory / "cache")


def test_rows_for_the_estimate_are_spread_evenly() -> None:
    assert evenly_spaced([range(0, 10), range(10, 10), range(20, 30)], 4) == [0, 5, 20, 25]
    assert evenly_spaced([range(3, 5)], 32) == [3, 4]
    assert evenly_spaced([range(0)], 32) == []
    assert evenly_spaced([], 32) == []
