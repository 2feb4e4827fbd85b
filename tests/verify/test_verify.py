"""Faults are found and named; a sound cache has none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import cut, into_folder, rewrite, spoil, stored
from synthetic_cache import IMAGE_ID, VOCAB, write_cache

import dspark
from dspark.schemas.claims import Claim
from dspark.schemas.digest import file_digest
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.manifest import Counts, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, columns_path, head_path, manifest_path
from dspark.verify.deep import check_contents
from dspark.verify.shallow import check_shallow


def faults(root: Path, *, deep: bool = True) -> list[str]:
    return [str(fault) for fault in dspark.verify_cache(root, deep=deep).faults]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", logits="topk:4", position_rows=3)


@pytest.mark.parametrize("logits", ["head", "full", "topk:3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_sound_cache(tmp_path: Path, logits: str, dtype: str) -> None:
    root = write_cache(tmp_path, logits=logits, dtype=dtype, position_rows=3)
    manifest = read_manifest(root)
    found = dspark.verify_cache(root, deep=True)
    assert (found.faults, found.notes, found.exit_code) == ((), (), 0)
    assert (found.shards, found.rows) == (3, manifest.counts.ok)
    real = manifest.counts.tokens * sum(f.token_bytes for f in manifest.fields)
    assert found.bytes_read == real + head_path(root).stat().st_size
    shallow = dspark.verify_cache(root)
    assert (shallow.faults, shallow.exit_code, shallow.bytes_read) == ((), 0, 0)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("shards/shard-00001-of-00003.safetensors", Path.unlink, "No such file"),
        ("shards/shard-00001-of-00003.safetensors", cut, "bytes long"),
        ("shards/shard-00001-of-00003.safetensors", spoil, "its header is not the one"),
        ("shards/shard-00001-of-00003.safetensors", into_folder, "not a file"),
        ("index/shard-00002-of-00003.parquet", Path.unlink, "missing, so its shard does not count"),
        ("index/shard-00002-of-00003.parquet", cut, "no sound sample index"),
        ("index/columns.safetensors", Path.unlink, "No such file"),
        ("index/columns.safetensors", cut, "bytes long"),
        ("index/columns.safetensors", spoil, "damaged: its bytes do not have the digest"),
        ("index/columns.safetensors", into_folder, "not a file"),
        ("target/head.safetensors", Path.unlink, "No such file"),
        ("target/head.safetensors", cut, "bytes long"),
        ("manifest.json", cut, None),
        ("manifest.json", spoil, "not a cache manifest"),
    ],
)
def test_the_shallow_check_names_the_file(
    cache: Path, file: str, change: Callable[[Path], None], words: str | None
) -> None:
    change(cache / file)
    if words is None:  # the last byte is a line break
        assert faults(cache, deep=False) == []
        return
    (fault,) = faults(cache, deep=False)
    assert fault.startswith(f"{file}: ")
    assert words in fault
    assert len(fault.splitlines()) == 1
    assert "run '" not in fault
    assert len(faults(cache, deep=True)) == 1


def test_totals_must_be_those_of_the_indexes(cache: Path) -> None:
    manifest = read_manifest(cache)
    counts = replace(manifest.counts, tokens=manifest.counts.tokens + 1)
    write_manifest(cache, replace(manifest, counts=counts, head_error=0.5))
    assert faults(cache, deep=False) == [
        "index/columns.safetensors: damaged: its sums are not the counts of the manifest",
        f"manifest.json: counts.tokens is {counts.tokens}, the indexes give {counts.tokens - 1}",
        "manifest.json: logits.head_error is 0.5, the indexes give None",
    ]


def test_columns_must_say_what_the_indexes_say(cache: Path) -> None:
    columns = np.memmap(columns_path(cache), "<i4", "r+", 4096, (3, 40))
    columns[:, [17, 23]] = columns[:, [23, 17]]  # both in shard 1
    columns.flush()
    manifest = read_manifest(cache)
    write_manifest(cache, replace(manifest, columns=file_digest(columns_path(cache))))
    dspark.open_cache(cache)
    assert faults(cache, deep=False) == [
        "index/columns.safetensors: it says otherwise than shard-00001-of-00003.parquet, which is "
        "sound"
    ]


def test_columns_left_by_a_capture_that_died_before_its_manifest_are_no_fault(cache: Path) -> None:
    write_manifest(cache, read_manifest(cache).unfinished())
    columns_path(cache).write_bytes(b"whatever")
    found = dspark.verify_cache(cache)
    assert (found.faults, found.notes, found.exit_code) == ((), (), 2)


def test_no_cache_or_another_version_cannot_be_told(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(IncompatibleCacheError, match="not a cache"):
        dspark.verify_cache(tmp_path / "nowhere")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text("{")
    with pytest.raises(IncompatibleCacheError, match="not readable as JSON"):
        dspark.verify_cache(tmp_path / "site")
    document = json.loads(manifest_path(cache).read_text())
    manifest_path(cache).write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(IncompatibleCacheError, match="version 2"):
        dspark.verify_cache(cache)


def test_committed_shards_of_an_unfinished_cache_are_checked(cache: Path) -> None:
    manifest = read_manifest(cache)
    write_manifest(cache, replace(manifest, complete=False, counts=Counts(), head_error=None))
    paths = CachePaths(cache, 3)
    paths.index(2).unlink()
    found = dspark.verify_cache(cache, deep=True)
    assert (found.exit_code, found.shards, found.complete) == (2, 2, False)
    cut(paths.shard(1))
    assert dspark.verify_cache(cache).exit_code == 1


def test_what_does_not_belong_is_mentioned(cache: Path) -> None:
    (cache / "shards" / "shard-00000-of-00009.safetensors").touch()
    (cache / "index" / "x.parquet.tmp").touch()
    found = dspark.verify_cache(cache)
    assert found.exit_code == 0
    assert found.notes == (
        "index/x.parquet.tmp: left by a capture that was stopped; the next one removes it",
        "shards/shard-00000-of-00009.safetensors: no part of the cache",
    )
    (cache / "index" / "x.parquet.tmp").unlink()
    with Claim(CachePaths(cache, 4).shard(0)):
        assert dspark.verify_cache(cache).notes[0] == (
            "shards/shard-00000-of-00004.safetensors.tmp: being written by a running capture"
        )


SAMPLE = 17
FILE = "shards/shard-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        *("inputs_embeds", "hidden_states.3", "last_hidden_state"),
        *("logits_topk.values", "logits_topk.indices", "logits_topk.logsumexp"),
        *("input_ids", "position_ids", "attention_mask", "loss_mask", "image_mask"),
    ],
)
def test_a_changed_number_is_named_by_row_and_field(cache: Path, name: str) -> None:
    numbers = stored(cache, SAMPLE)[name]
    numbers.reshape(-1)[-1] += 1
    rewrite(cache, SAMPLE, name, numbers, digest=False)
    assert faults(cache, deep=False) == []
    assert faults(cache) == [
        f"{FILE}, dataset row {SAMPLE}, field {name}: its bytes are not those that were captured"
    ]


def first(value: float) -> Callable[[np.ndarray], None]:
    return lambda numbers: numbers.reshape(-1).__setitem__(0, value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("inputs_embeds", first(np.nan), "a number is not finite"),
        ("last_hidden_state", first(-np.inf), "a number is not finite"),
        ("logits_topk.logsumexp", first(np.inf), "a number is not finite"),
        ("logits_topk.indices", first(VOCAB), "an id is beyond the 48 logits"),
        ("logits_topk.indices", first(-1), "an id is beyond the 48 logits"),
        ("input_ids", first(VOCAB), "an id is beyond the vocabulary of 48"),
        ("input_ids", first(IMAGE_ID), None),
        ("position_ids", first(-1), "a position is negative"),
        ("attention_mask", first(0), "a real token is not 1"),
        ("loss_mask", first(2), "it holds something else than 0 and 1"),
        ("loss_mask", first(1), "tokens are 1, the index counts"),
        ("image_mask", first(1), "tokens are 1, the index counts"),
    ],
)
def test_wrong_numbers_are_found_behind_right_digests(
    cache: Path, name: str, change: Callable[[np.ndarray], None], words: str | None
) -> None:
    numbers = stored(cache, SAMPLE)[name]
    change(numbers)
    rewrite(cache, SAMPLE, name, numbers, digest=True)
    found = faults(cache)
    if words is None:
        name, words = "image_mask", "not 1 exactly where input_ids is the picture token"
    assert any(
        f.startswith(f"{FILE}, dataset row {SAMPLE}, field {name}: ") and words in f for f in found
    ), found


def test_masks_must_be_disjoint(cache: Path) -> None:
    numbers = stored(cache, SAMPLE)
    loss, image = numbers["loss_mask"], numbers["image_mask"]
    assert image.any()
    loss[loss.argmax()], loss[image.argmax()] = 0, 1
    rewrite(cache, SAMPLE, "loss_mask", loss, digest=True)
    assert faults(cache) == [
        f"{FILE}, dataset row {SAMPLE}, field loss_mask: a picture position is supervised"
    ]


def test_several_faults_in_the_order_of_rows(cache: Path) -> None:
    for sample in (30, 2, 17):
        numbers = stored(cache, sample)["inputs_embeds"]
        rewrite(cache, sample, "inputs_embeds", numbers + 1, digest=False)
    spoil(cache / "target" / "head.safetensors")
    found = dspark.verify_cache(cache, deep=True).faults
    assert [f.sample for f in found] == [None, 2, 17, 30]
    assert found[0].problem == "its bytes are not those that were written"


def test_a_row_longer_than_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and portions do not matter to what is found."""
    from dspark.schemas import safetensors_shard
    from dspark.verify import deep

    monkeypatch.setattr(safetensors_shard, "_PIECE", 48)
    monkeypatch.setattr(deep, "_TASK", 1000)
    cache = write_cache(tmp_path, logits="topk:4", position_rows=3, shards=1)
    assert faults(cache) == []
    numbers = stored(cache, 38)["hidden_states.2"]
    numbers[-1, -1] = -numbers[-1, -1]
    rewrite(cache, 38, "hidden_states.2", numbers, digest=False)
    (fault,) = dspark.verify_cache(cache, deep=True).faults
    assert (fault.sample, fault.field) == (38, "hidden_states.2")


def test_a_shard_that_goes_away_meanwhile_is_one_fault(cache: Path) -> None:
    paths, manifest = CachePaths(cache, 3), read_manifest(cache)
    found = check_shallow(cache, manifest)
    assert found.readable == [[0, 1, 2]]
    paths.shard(1).unlink()
    faults = check_contents(cache, manifest, found.readable, [], lambda size: None)
    assert {str(fault) for fault in faults} == {
        "shards/shard-00001-of-00003.safetensors: cannot be read (No such file or directory)"
    }
