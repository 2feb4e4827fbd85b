"""What cannot be read may be sound: it is named, is no damage, and no repair takes it out."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import cut, into_file, lock_out, rewrite, stored
from mounts import ext4
from rights import no_rights
from synthetic_cache import write_cache

import dspark
from dspark.capture.finish import is_committed
from dspark.schemas import safetensors_shard
from dspark.schemas.errors import IncompatibleCacheError, InputError, UnreadableError
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths, head_path, manifest_path
from dspark.train_from_cache.target_head import TargetHead
from dspark.verify.repair import Repair, repair_cache

Command = Callable[..., tuple[int, str, str]]

INDEX = "index/shard-00001-of-00003.parquet"
COLUMNS = "index/columns.safetensors"
SHARD = "shards/shard-00001-of-00003.safetensors"
HEAD = "target/head.safetensors"


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache")


@pytest.mark.parametrize("file", [INDEX, COLUMNS, SHARD, HEAD])
def test_a_file_without_the_right_to_read_it(cache: Path, run_dspark: Command, file: str) -> None:
    before = digests(cache)
    deep = ["--deep"] if file == HEAD else []  # else only its size is looked at
    with no_rights(cache / file):
        code, out, err = run_dspark("verify", "--cache", cache, *deep)
        assert code == 2
        lines = out.splitlines()
        assert lines[0] == f"{file}: cannot be read (Permission denied); make it readable"
        assert lines[1].startswith(f"{cache}: cannot tell, 1 file cannot be read; nothing wrong")
        assert "no repair takes it out; make it readable and verify again" in lines[2]
        code, out, err = run_dspark("verify", "--cache", cache, *deep, "--repair")
        assert code == 2
        assert f"dspark: {cache / file}: cannot be read (Permission denied), so what is" in err
        inspected = run_dspark("inspect", "--cache", cache)[1]
        assert "DAMAGED" not in inspected
        assert "NOT READABLE" in inspected.splitlines()[0] or file == HEAD
    assert digests(cache) == before
    assert read_manifest(cache).complete
    assert dspark.verify_cache(cache, deep=True).exit_code == 0


@pytest.mark.parametrize("folder", ["index", "shards", "target", "."])
def test_a_folder_without_rights(cache: Path, run_dspark: Command, folder: str) -> None:
    with no_rights(cache / folder):
        code, out, err = run_dspark("verify", "--cache", cache, "--deep")
        assert code == 2
        assert f"{'' if folder == '.' else folder}" in out + err
        assert "cannot be read (Permission denied)" in out + err
        assert "make it readable" in out + err
        assert "what is committed stays" not in err
        assert run_dspark("inspect", "--cache", cache)[0] in ((0, 2) if folder != "." else (2,))
        with pytest.raises(InputError):
            repair_cache(dspark.verify_cache(cache))
    assert dspark.verify_cache(cache, deep=True).exit_code == 0


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda paths: lock_out(paths.shard(1)), "Too many levels of symbolic links"),
        (lambda paths: lock_out(head_path(paths.root)), "Too many levels of symbolic links"),
        *(
            (lambda paths, name=name: into_file(paths.root / name), "Not a directory")
            for name in ("shards", "index", "target")
        ),
    ],
)
def test_it_is_left_alone_with_all_the_rest_that_is_damaged(
    cache: Path, harm: Callable[[CachePaths], None], said: str
) -> None:
    paths = CachePaths(cache, 3)
    cut(head_path(cache) if "Too" in said else manifest_path(cache))
    rewrite(cache, 3, "inputs_embeds", stored(cache, 3)["inputs_embeds"] + 1, digest=False)
    harm(paths)
    before = digests(cache)
    with pytest.raises(InputError, match=rf"cannot be read \({said}\).*nothing was taken out"):
        repair_cache(dspark.verify_cache(cache, deep=True))
    assert digests(cache) == before
    assert read_manifest(cache).complete


def test_a_manifest_that_cannot_be_read_may_be_sound(cache: Path) -> None:
    with (
        no_rights(manifest_path(cache)),
        pytest.raises(UnreadableError, match=r"cannot be read \(Permission .*; make it readable"),
    ):
        dspark.verify_cache(cache)
    lock_out(manifest_path(cache))
    with pytest.raises(UnreadableError, match=r"cannot be read \(Too many .*out of the way"):
        dspark.verify_cache(cache)


def test_a_disk_that_has_failed(tmp_path: Path) -> None:
    """Folders and sizes are still in memory; what is opened gives EIO."""
    with ext4(tmp_path / "disk", 16 << 20) as fail:
        cache = write_cache(tmp_path / "disk" / "cache")
        sound = dspark.verify_cache(cache, deep=True)
        assert sound.exit_code == 0
        fail()
        with pytest.raises(
            UnreadableError, match="Input/output error.*bring the disk or the mount"
        ):
            dspark.verify_cache(cache, deep=True)
        with pytest.raises(UnreadableError, match="Input/output error"):
            repair_cache(sound)


def test_a_disk_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = safetensors_shard.read_fully
    with ext4(tmp_path / "disk", 16 << 20) as fail:
        cache = write_cache(tmp_path / "disk" / "cache")
        reads = 0

        def failing(fd: int, out: memoryview, offset: int, path: Path) -> None:
            nonlocal reads
            reads += 1
            if reads == 150:
                fail()
            fill(fd, out, offset, path)

        monkeypatch.setattr(safetensors_shard, "read_fully", failing)
        found = dspark.verify_cache(cache, deep=True)
        assert reads >= 150
    assert (found.faults, found.exit_code) == ((), 2)
    assert found.unreadable
    assert {f.problem for f in found.unreadable} == {"cannot be read (Input/output error)"}


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN"])
def test_a_read_that_fails_in_the_middle(
    cache: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """What was read before and is damaged is told as damage."""
    number = getattr(errno, code)
    rewrite(cache, 14, "inputs_embeds", stored(cache, 14)["inputs_embeds"] + 1, digest=False)
    before = digests(cache)
    fill = safetensors_shard.read_fully
    reads = 0

    def failing(fd: int, out: memoryview, offset: int, path: Path) -> None:
        nonlocal reads
        if SHARD in str(path):
            reads += 1
            if reads % 7 == 0:
                raise OSError(number, os.strerror(number))
        fill(fd, out, offset, path)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_shard, "read_fully", failing)
        found = dspark.verify_cache(cache, deep=True)
        assert {f.file for f in found.unreadable} == {SHARD}
        assert f"cannot be read ({os.strerror(number)}); bring the disk" in str(found.unreadable[0])
        assert all(f.sample == 14 for f in found.faults)
        with pytest.raises(InputError, match="nothing was taken out"):
            repair_cache(found)
    assert digests(cache) == before


def test_what_reads_as_sound_the_second_time_is_left(cache: Path) -> None:
    shard = CachePaths(cache, 3).shard(1)
    kept = shard.read_bytes()
    before = digests(cache)
    rewrite(cache, 17, "inputs_embeds", stored(cache, 17)["inputs_embeds"] + 1, digest=False)
    found = dspark.verify_cache(cache, deep=True)
    shard.write_bytes(kept)
    assert repair_cache(found) == Repair(sound=(SHARD,))
    assert digests(cache) == before
    shard.write_bytes(b"")
    found = dspark.verify_cache(cache, deep=True)
    cut(head_path(cache))  # nobody has found that
    shard.write_bytes(kept)
    assert repair_cache(found) == Repair(sound=(SHARD,))
    assert head_path(cache).exists()


def test_a_manifest_that_reads_as_sound_the_second_time_is_left(cache: Path) -> None:
    kept = manifest_path(cache).read_bytes()
    manifest_path(cache).write_bytes(kept[:-9])
    found = dspark.verify_cache(cache)
    assert found.manifest is None
    manifest_path(cache).write_bytes(kept)
    assert repair_cache(found) == Repair(sound=("manifest.json",))
    assert manifest_path(cache).read_bytes() == kept


@pytest.mark.parametrize("file", [INDEX, SHARD, HEAD, "manifest.json"])
def test_a_trainer_asks_for_the_right_to_read(cache: Path, file: str) -> None:
    with (
        no_rights(cache / file),
        pytest.raises(UnreadableError, match=rf"{file}: cannot be read \(Per.*make it readable$"),
    ):
        dspark.open_cache(cache, check_digests=True)[17]
    with no_rights(head_path(cache)), pytest.raises(UnreadableError, match="make it readable"):
        TargetHead.load(cache)


def test_a_capture_does_not_take_an_unreadable_index_for_none(cache: Path) -> None:
    paths, manifest = CachePaths(cache, 3), read_manifest(cache)
    assert is_committed(manifest, paths, 1)
    for path in (cache / INDEX, cache / "shards"):
        with no_rights(path), pytest.raises(PermissionError):
            is_committed(manifest, paths, 1)


def test_a_foreign_manifest_is_the_fault_and_not_the_shards(cache: Path, tmp_path: Path) -> None:
    before = digests(cache)
    for i, shards in enumerate((3, 4)):
        other = write_cache(tmp_path / f"other-{i}", seed=1, shards=shards)
        manifest_path(cache).write_bytes(manifest_path(other).read_bytes())
        found = dspark.verify_cache(cache, deep=True)
        (fault,) = found.faults
        assert str(fault).startswith("manifest.json: it belongs to a capture with other settings")
        assert found.exit_code == 1
        with no_rights(CachePaths(cache, 3).index(0)):
            assert dspark.verify_cache(cache, deep=True).faults == found.faults
        assert repair_cache(found) == Repair(files=("manifest.json",))
        before.pop("manifest.json", None)
        assert digests(cache) == before


def test_one_foreign_index_among_others_is_the_fault(cache: Path, tmp_path: Path) -> None:
    other = write_cache(tmp_path / "other", seed=1)
    (cache / INDEX).write_bytes((other / INDEX).read_bytes())
    (fault,) = dspark.verify_cache(cache).faults
    assert fault.shard == 1
    opened = dspark.open_cache(cache)
    assert len(opened[0]["input_ids"])
    with pytest.raises(IncompatibleCacheError, match=f"{INDEX}: .*other settings than the mani"):
        opened[17]
