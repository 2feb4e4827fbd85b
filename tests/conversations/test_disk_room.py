"""A disk that is clearly too small is refused before the first forward."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversation_data import mixed_rows, write_rows

import dspark
from dspark.capture.disk_room import evenly_spaced
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


def test_rows_for_the_estimate_are_spread_evenly() -> None:
    assert evenly_spaced([range(0, 10), range(10, 10), range(20, 30)], 4) == [0, 5, 20, 25]
    assert evenly_spaced([range(3, 5)], 32) == [3, 4]
    assert evenly_spaced([range(0)], 32) == []
    assert evenly_spaced([], 32) == []
