"""The end of a capture: what follows from all indexes is written, or written again."""

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows
from damage import cut, spoil
from safetensors.numpy import load_file

import dspark
from dspark.capture.estimate.run import estimate_capture
from dspark.capture.options import CaptureOptions
from dspark.capture.run import CaptureReport
from dspark.schemas.digest import file_digest
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, columns_path

NAME = "index/columns.safetensors"
SHARDS = 3


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def options(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    data = write_rows(tmp_path_factory.mktemp("data") / "d.parquet", mixed_rows(7))
    return {"target": str(tiny_target("llava")), "data": str(data)}


@pytest.fixture(scope="module")
def whole(options: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "cache"
    dspark.capture(SHARDS, **options, out=str(out))
    return out


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "cache")


def again(options: dict[str, str], cache: Path) -> CaptureReport:
    report = dspark.capture(SHARDS, **options, out=str(cache))
    assert report is not None
    return report


def test_a_capture_ends_with_the_columns_of_its_indexes(whole: Path) -> None:
    manifest, paths = read_manifest(whole), CachePaths(whole, SHARDS)
    stored = load_file(columns_path(whole))
    for name, numbers in stored.items():
        tables = [read_index(paths, manifest, shard)[0] for shard in range(SHARDS)]
        assert numbers.tolist() == [n for table in tables for n in table[name].to_pylist()]
    assert manifest.columns == file_digest(columns_path(whole))
    assert stored["length"].sum() == manifest.counts.tokens > 0


@pytest.mark.parametrize("damage", [Path.unlink, cut, spoil])
def test_damaged_columns_are_written_again_and_nothing_else(
    options: dict[str, str], whole: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()}
    damage(columns_path(cache))
    report = again(options, cache)
    assert (report.shards_written, report.rewritten) == (0, (NAME,))
    assert digests(cache) == digests(whole)
    del before[columns_path(cache)]
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.parametrize("left", ["the same", "other bytes", "none"])
def test_a_capture_that_died_before_its_manifest_ends_in_the_same_bytes(
    options: dict[str, str], whole: Path, cache: Path, left: str
) -> None:
    write_manifest(cache, read_manifest(cache).unfinished())
    if left == "none":
        columns_path(cache).unlink()
    elif left == "other bytes":
        columns_path(cache).write_bytes(b"\0" * 5000)
    report = again(options, cache)
    assert (report.shards_written, report.rewritten) == (0, (NAME, "manifest.json"))
    assert digests(cache) == digests(whole)


KILLED = """
import os, signal, sys
import dspark
from dspark.capture import run

write = run.write_manifest

def killed(root, manifest):
    if manifest.complete:
        os.kill(os.getpid(), signal.SIGKILL)
    write(root, manifest)

run.write_manifest = killed
dspark.capture(3, target=sys.argv[1], data=sys.argv[2], out=sys.argv[3])
"""


def test_killed_between_columns_and_manifest(
    options: dict[str, str], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, options["target"], options["data"], str(out)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert columns_path(out).read_bytes() == columns_path(whole).read_bytes()
    with pytest.raises(IncompatibleCacheError, match="not finished"):
        dspark.open_cache(out)
    assert again(options, out).shards_written == 0
    assert digests(out) == digests(whole)


def test_no_columns_no_finished_cache(options: dict[str, str], cache: Path) -> None:
    write_manifest(cache, read_manifest(cache).unfinished())
    columns_path(cache).unlink()
    columns_path(cache).mkdir()
    with pytest.raises(IsADirectoryError):
        again(options, cache)
    assert not read_manifest(cache).complete
    assert list((cache / "index").glob("*.tmp")) == []


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_an_extension_is_refused_before_the_target_is_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    def load_target(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    for module in ("run", "estimate.run"):
        monkeypatch.setattr(f"dspark.capture.{module}.load_target", load_target)
    damage(columns_path(cache))
    before = digests(cache)
    asked = {"extend": True, "layers": "-1", "out": str(cache)}
    for ask in (dspark.capture, lambda **given: estimate_capture(CaptureOptions(**given))):
        with pytest.raises(IncompatibleCacheError, match=r"columns\.safetensors: .*dspark capture"):
            ask(**asked)
    assert digests(cache) == before


def test_an_extension_with_rows_of_other_lengths_is_not_finished(
    options: dict[str, str], cache: Path
) -> None:
    columns = columns_path(cache).read_bytes()
    dspark.capture(extend=True, layers="-1", out=str(cache), only="0-1")
    part, paths = read_manifest(cache).parts[1], CachePaths(cache, SHARDS, 1)
    table, facts = read_index(paths, part, 0)
    rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist()]
    write_index(paths.index(0), [replace(rows[0], length=1, loss_tokens=1), *rows[1:]], facts)
    with pytest.raises(IncompatibleCacheError, match=r"plus1\.parquet: it lists other rows than"):
        dspark.capture(extend=True, layers="-1", out=str(cache))
    assert not read_manifest(cache).extensions[0].complete
    paths.index(0).unlink()
    dspark.capture(extend=True, layers="-1", out=str(cache))
    assert dspark.verify_cache(cache, deep=True).exit_code == 0
    assert columns_path(cache).read_bytes() == columns
