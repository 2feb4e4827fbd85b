"""What ``dspark verify`` and ``dspark inspect`` print of damage, and their exit codes."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from damage import cut, into_folder, rewrite, stored
from synthetic_cache import write_cache

from dspark.schemas.manifest import Counts, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, head_path, manifest_path

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "c")


def test_sound(cache: Path, run_dspark: Command) -> None:
    code, out, _ = run_dspark("verify", "--cache", cache)
    assert code == 0
    assert out.startswith(f"{cache}: sound; 3 of 3 shards checked (35 rows, by sizes, headers,")
    code, out, err = run_dspark("verify", "--cache", cache, "--deep")
    assert code == 0
    assert out.startswith(f"{cache}: sound; 3 of 3 shards checked (every byte of 35 rows read: ")
    assert "verify: 100%" in err
    code, out, _ = run_dspark("inspect", "--cache", cache)
    assert code == 0
    assert "DAMAGED" not in out


def test_damaged(cache: Path, run_dspark: Command) -> None:
    cut(head_path(cache))
    rewrite(cache, 2, "inputs_embeds", stored(cache, 2)["inputs_embeds"] + 1, digest=False)
    code, out, _ = run_dspark("verify", "--cache", cache, "--deep")
    assert code == 1
    size = head_path(cache).stat().st_size
    assert out.splitlines()[:2] == [
        f"target/head.safetensors: {size:,} bytes long, {size + 1:,} expected",
        "shards/shard-00000-of-00003.safetensors, dataset row 2, field inputs_embeds: its bytes "
        "are not those that were captured",
    ]
    assert f"{cache}: damaged: 2 faults, 1 damaged shard (0); 3 of 3 shards checked" in out
    assert f"'dspark verify --cache {cache} --deep --repair' takes out what is damaged" in out
    assert (
        f"then: dspark capture --shards 3 --target synthetic --data synthetic --out {cache}" in out
    )
    inspected = run_dspark("inspect", "--cache", cache)[1].splitlines()[-1]
    assert inspected.startswith("DAMAGED: 1 fault, the first: target/head.safetensors: ")
    assert len(json.loads(run_dspark("inspect", "--cache", cache, "--json")[1])["faults"]) == 1


def test_unfinished_and_nothing(cache: Path, tmp_path: Path, run_dspark: Command) -> None:
    manifest = read_manifest(cache)
    write_manifest(cache, replace(manifest, complete=False, counts=Counts(), head_error=None))
    CachePaths(cache, 3).index(1).unlink()
    code, out, _ = run_dspark("verify", "--cache", cache)
    assert code == 2
    assert "cannot tell, the capture is not finished; nothing wrong so far; 2 of 3 shards" in out
    assert "then: dspark capture --shards 3" in out
    inspected = run_dspark("inspect", "--cache", cache)[1]
    assert "captured rows and tokens are counted when the capture ends" in inspected
    assert "0 tokens" not in inspected and "0 B" not in inspected
    code, out, err = run_dspark("verify", "--cache", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "is not a cache" in err


def test_many_faults_are_cut_in_text_and_whole_in_json(cache: Path, run_dspark: Command) -> None:
    shard = CachePaths(cache, 3).shard(0)
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    _, out, _ = run_dspark("verify", "--cache", cache, "--deep")
    document = json.loads(run_dspark("verify", "--cache", cache, "--deep", "--json")[1])
    faults = len(document["faults"])
    assert faults == 12 * len(read_manifest(cache).fields)  # 12 of 14 rows hold a sample
    assert f"… and {faults - 50} more; --json has all" in out
    assert len(out.splitlines()) == 50 + 1 + 4
    assert document["faults"][0] | {"problem": ""} == {
        "file": "shards/shard-00000-of-00003.safetensors",
        "problem": "",
        "shard": 0,
        "sample": 0,
        "field": "attention_mask",
        "part": 0,
    }


def test_rows_of_a_cut_shard_do_not_count_as_read(cache: Path, run_dspark: Command) -> None:
    cut(CachePaths(cache, 3).shard(0))
    _, out, err = run_dspark("verify", "--cache", cache, "--deep")
    assert "(every byte of 23 rows read: " in out  # shard 0 holds 12 of the 35
    assert "verify: 100%" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_damage_is_told_whatever_fails_after_it_was_found(
    cache: Path, run_dspark: Command, as_json: bool
) -> None:
    more = ["--json"] if as_json else []
    for shard in range(3):
        cut(CachePaths(cache, 3).shard(shard))
    code, out, err = run_dspark("verify", "--cache", cache, "--against", "target", *more)
    assert (code, err) == (1, f"dspark: {cache}: it has no sound row to compare\n")
    assert out.count("bytes long") == 3
    into_folder(CachePaths(cache, 3).shard(1))
    code, out, err = run_dspark("verify", "--cache", cache, "--repair", *more)
    assert code == 1
    assert "a directory lies in the place of a file" in err
    assert out.count("bytes long") == 2
    if as_json:
        assert json.loads(out)["repaired"] is None


def test_a_strangers_names_do_not_reach_the_terminal(cache: Path, run_dspark: Command) -> None:
    manifest = read_manifest(cache)
    target = replace(manifest.target, id="a\x1b[2Jb\nDAMAGED")
    write_manifest(cache, replace(manifest, target=target, data="d\x07", complete=False))
    os.close(os.open(os.fsencode(cache) + b"/x\x1b]0;\n\xff", os.O_CREAT))
    for args in (["verify"], ["inspect"]):
        _, out, err = run_dspark(*args, "--cache", cache)
        assert not {c for c in out + err if not c.isprintable()} - {"\n", "\r"}
        assert "\\x1b" in out
        assert not any(line.startswith("DAMAGED") for line in out.splitlines())
    _, _, err = run_dspark("verify", "--cache", "no\x1bwhere\n")
    assert err == "dspark: no\\x1bwhere is not a cache: " + err.partition("is not a cache: ")[2]


def test_inspect_says_damage_at_once(cache: Path, run_dspark: Command) -> None:
    cut(CachePaths(cache, 3).shard(0))
    code, out, _ = run_dspark("inspect", "--cache", cache)
    assert code == 1
    assert out.splitlines()[0].startswith(f"{cache}: DAMAGED (see below), ")
    assert out.splitlines()[-1].startswith("DAMAGED: 1 fault, the first: ")
    cut(manifest_path(cache))
    cut(manifest_path(cache))
    assert run_dspark("inspect", "--cache", cache)[0] == 2


@pytest.mark.parametrize(
    "given", ["--data 16", "--chat-template 16", "--rows 16", "--seed 16", "--trust-remote-code"]
)
def test_options_of_against_without_it(cache: Path, run_dspark: Command, given: str) -> None:
    code, out, err = run_dspark("verify", "--cache", cache, *given.split())
    assert (code, out) == (2, "")
    assert err == f"dspark: {given}: only --against reads it; give --against as well\n"
