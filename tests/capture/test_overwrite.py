"""``--overwrite`` deletes a cache, says what it deletes, and deletes nothing else."""

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows

import dspark
from dspark.capture.overwrite import delete_cache
from dspark.schemas.claims import Claim
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in root.rglob("*")
        if p.is_file()
    }


@pytest.fixture(scope="module")
def options(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    data = write_rows(tmp_path_factory.mktemp("data") / "d.parquet", mixed_rows(6))
    return {"target": str(tiny_target("qwen2_5_vl")), "data": str(data)}


@pytest.fixture(scope="module")
def made(options: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "cache"
    dspark.capture(3, **options, out=str(out))
    return out


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "cache")


def test_other_settings_start_anew(
    cache: Path, options: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match="--overwrite"):
        dspark.capture(2, **options, out=str(cache), dtype="fp32")
    with caplog.at_level(logging.WARNING):
        dspark.capture(2, **options, out=str(cache), dtype="fp32", overwrite=True)
    said = [r.getMessage() for r in caplog.records if "--overwrite" in r.getMessage()]
    assert len(said) == 1
    for words in (f"cache in {cache}", "3 shards of 3", options["target"], options["data"]):
        assert words in said[0]
    dspark.capture(2, **options, out=str(tmp_path / "new"), dtype="fp32", overwrite=True)
    assert digests(cache) == digests(tmp_path / "new")


@pytest.mark.parametrize("published", [False, True])
def test_a_cache_that_is_being_written_stays(cache: Path, published: bool) -> None:
    shard = CachePaths(cache, 3).shard(1)
    shard.unlink()
    with Claim(shard) as claim:
        if published:
            claim.publish()
        before = digests(cache)
        with pytest.raises(InputError, match=r"a capture is running.*shard-00001-of-00003"):
            delete_cache(cache)
        assert digests(cache) == before


@pytest.mark.parametrize(
    "path",
    [
        "shards/notes.txt",
        "shards/shard-00000-of-00003.safetensors.bak",
        "index/old/shard-00000-of-00003.parquet",
        "target/mine.json",
        "thesis.tmp",
    ],
)
def test_what_is_not_ours_stays(cache: Path, path: str) -> None:
    other = cache / path
    other.parent.mkdir(exist_ok=True)
    other.write_text("mine")
    before = digests(cache)
    with pytest.raises(InputError) as error:
        delete_cache(cache)
    assert str(other) in str(error.value)
    assert digests(cache) == before


def test_links_are_not_followed(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(cache / "shards", elsewhere)
    (cache / "shards").symlink_to(elsewhere)
    before = digests(elsewhere)
    with pytest.raises(InputError, match="a link to another directory"):
        delete_cache(cache)
    (cache / "shards").unlink()
    (cache / "shards").mkdir()
    for shard in elsewhere.iterdir():
        (cache / "shards" / shard.name).symlink_to(shard)
    delete_cache(cache)
    assert digests(elsewhere) == before
    assert not digests(cache)


def test_what_dead_captures_left_goes_too(cache: Path) -> None:
    shard = CachePaths(cache, 3).shard(1)
    shard.rename(f"{shard}.tmp")
    (cache / "index" / "shard-00001-of-00003.parquet.0123abcd.tmp").touch()
    delete_cache(cache)
    assert not digests(cache)


def test_an_interrupted_deletion_leaves_no_cache_and_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink
    for calls in (2, 3, 3):
        left = calls

        def interrupted(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            delete_cache(cache)
        assert digests(cache)
        assert not read_manifest(cache).complete
        with pytest.raises(InputError):
            dspark.open_cache(cache)
    monkeypatch.setattr(Path, "unlink", unlink)
    delete_cache(cache)
    assert not digests(cache)


def test_an_empty_or_missing_directory_is_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delete_cache(tmp_path)
    delete_cache(tmp_path / "none")
    assert not caplog.records
    assert not (tmp_path / "none").exists()
