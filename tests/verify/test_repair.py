"""Repair, then capture: the same bytes as if nothing had happened."""

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows
from damage import cut, into_folder, rewrite, spoil, stored
from flipped_bytes import capture_small, xor_byte
from synthetic_cache import write_cache

import dspark
from dspark.cli import main
from dspark.schemas.claims import Claim
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths, columns_path, manifest_path
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify import repair
from dspark.verify.repair import Repair, repair_cache


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


Command = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a ``dspark …`` command here: exit code and stdout."""

    def run(command: list[str]) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().out

    return run


def test_repair_and_the_printed_command_give_the_same_bytes(
    tiny_target: Callable[[str], Path], tmp_path: Path, run: Command
) -> None:
    cache = capture_small(tmp_path, tiny_target("qwen2_5_vl"), "topk:4", rows=14)
    whole = digests(cache)
    shards = sorted((cache / "shards").iterdir())
    manifest = read_manifest(cache)
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    xor_byte(shards[1], layout.row_extents(manifest.fields[0], row=1, length=1)[0][0], 1)
    cut(CachePaths(cache, 3).index(2))
    cut(columns_path(cache))
    spoil(cache / "target" / "tokenizer.json")
    kept = shards[0].stat().st_mtime_ns

    verify = ["dspark", "verify", "--cache", str(cache), "--deep", "--repair", "--json"]
    code, printed = run(verify)
    assert code == 1
    document = json.loads(printed)
    assert [f["file"] for f in document["faults"]] == [
        "index/columns.safetensors",
        "target/tokenizer.json",
        f"shards/{shards[1].name}",
        f"index/{shards[2].stem}.parquet",
    ]
    assert document["repaired"] == {
        "shards": [1, 2],
        "files": ["index/columns.safetensors", "target/tokenizer.json"],
        "busy": [],
        "sound": [],
    }
    left = dspark.verify_cache(cache, deep=True)
    assert (left.faults, left.exit_code, left.shards) == ((), 2, 1)

    command = [*shlex.split(document["capture_command"]), "--max-skipped", "0.5"]
    code, printed = run(command)
    assert code == 0
    assert "2 written now" in printed
    assert shards[0].stat().st_mtime_ns == kept
    assert digests(cache) == whole

    manifest_path(cache).write_bytes(
        manifest_path(cache).read_bytes().replace(b'"tokens": ', b'"tokens": 1')
    )
    found = dspark.verify_cache(cache)
    assert "the digest that it names" in str(found.faults[0])
    assert repair_cache(found) == Repair(files=("manifest.json",))
    code, printed = run(command)
    assert code == 0
    everything_else = "target/ and index/columns.safetensors and manifest.json"
    assert f"complete again; {everything_else} written now, no shard was missing" in printed
    assert digests(cache) == whole

    spoil(columns_path(cache))
    assert repair_cache(dspark.verify_cache(cache)) == Repair(files=("index/columns.safetensors",))
    code, printed = run(command)
    assert code == 0
    assert "index/columns.safetensors and manifest.json written now, no shard was" in printed
    assert digests(cache) == whole
    assert "complete already, nothing to do" in run(command)[1]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    cache = write_cache(tmp_path / "cache")
    rewrite(cache, 3, "inputs_embeds", stored(cache, 3)["inputs_embeds"] + 1, digest=False)
    cut(CachePaths(cache, 3).index(2))
    cut(cache / "target" / "head.safetensors")
    return cache


def test_what_a_running_capture_claims_is_left_alone(damaged: Path) -> None:
    paths = CachePaths(damaged, 3)
    with Claim(paths.shard(0)):
        found = repair_cache(dspark.verify_cache(damaged, deep=True))
    assert found == Repair(shards=(2,), files=("target/head.safetensors",), busy=(0,))
    assert paths.shard(0).exists()
    assert paths.index(0).exists()
    assert not paths.shard(2).exists()
    assert not paths.index(2).exists()


def test_a_sound_cache_is_not_touched(tmp_path: Path) -> None:
    cache = write_cache(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    assert repair_cache(dspark.verify_cache(cache, deep=True)) == Repair()
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


def test_a_crash_at_any_moment_leaves_nothing_that_looks_whole(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = repair._remove
    removals = 5  # head weights; index and data of two shards
    for crash in range(removals):
        cache = shutil.copytree(damaged, tmp_path / f"crash-{crash}")
        left = crash

        def stopped(path: Path) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            remove(path)

        monkeypatch.setattr(repair, "_remove", stopped)
        found = dspark.verify_cache(cache, deep=True)
        with pytest.raises(KeyboardInterrupt):
            repair_cache(found)
        with pytest.raises(IncompatibleCacheError, match="not finished"):
            dspark.open_cache(cache)
        for shard in range(3):  # an index never outlives its data
            paths = CachePaths(cache, 3)
            assert paths.shard(shard).exists() or not paths.index(shard).exists()
        monkeypatch.setattr(repair, "_remove", remove)
        repair_cache(dspark.verify_cache(cache, deep=True))
        finished = dspark.verify_cache(cache, deep=True)
        assert (finished.shards, finished.exit_code) == (1, 2)


def test_a_folder_in_the_place_of_a_file_is_the_users(tmp_path: Path) -> None:
    cache = write_cache(tmp_path)
    into_folder(CachePaths(cache, 3).shard(1))
    with pytest.raises(InputError, match="a directory lies in the place of a file"):
        repair_cache(dspark.verify_cache(cache))


def test_another_programs_manifest_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    manifest_path(tmp_path).write_text('{"format": "zip"}')
    with pytest.raises(IncompatibleCacheError, match="not a cache manifest"):
        dspark.verify_cache(tmp_path)


def test_a_missing_manifest_of_committed_shards(tmp_path: Path) -> None:
    manifest_path(write_cache(tmp_path)).unlink()
    with pytest.raises(IncompatibleCacheError, match="missing; the capture command that made"):
        dspark.verify_cache(tmp_path)


def test_the_printed_command_has_the_options_of_the_capture(
    tiny_target: Callable[[str], Path], tmp_path: Path, run: Command
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(7))
    cache = tmp_path / "a folder"
    dspark.capture(
        2,
        target=str(tiny_target("llava")),
        data=str(data),
        out=str(cache),
        limit=6,
        layers="-1,1",
        dtype="fp32",
        logits="head",
        max_length=96,
        overlong="truncate",
        batch_tokens=100,
        attn_implementation="eager",
        image_root=str(tmp_path),
        allow_download=True,
        mask_reasoning=True,
        fake_image="always",
    )
    whole = digests(cache)
    CachePaths(cache, 2).index(1).unlink()
    _, printed = run(["dspark", "verify", "--cache", str(cache), "--json"])
    code, printed = run(shlex.split(json.loads(printed)["capture_command"]))
    assert code == 0
    assert "1 written now" in printed
    assert digests(cache) == whole
