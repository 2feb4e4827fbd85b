"""Damaged bytes are found while they are read, if that was asked for."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic_cache import VOCAB, write_cache

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.paths import CachePaths, head_path
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.stream import BatchStream

SHARDS = 3
ID_LIMITS = {"input_ids": VOCAB, "logits_topk.indices": VOCAB}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_cache(
        tmp_path / "cache", shards=SHARDS, position_rows=3, logits="topk:2", skip_every=7
    )


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 64]), offset)


def place(cache: Cache, sample: int, field: Field, run: int, byte: int) -> tuple[Path, int]:
    """Where a byte of a run of a field lies; -1 is the run's last."""
    shard, row = divmod(sample, cache.manifest.rows_per_shard)
    layout = ShardLayout(cache.manifest.fields, cache.manifest.rows_per_shard)
    offset, size = layout.row_extents(field, row, int(cache.lengths[sample]))[run]
    return CachePaths(cache.root, SHARDS).shard(shard), offset + byte % size


def read(cache: Cache, fields: list[Field], rows: list[int]) -> list[int]:
    with BatchStream(cache, fields, [[row] for row in rows], batch_size=1, trim=True) as stream:
        return [row for batch in stream for row in batch["sample"].tolist()]


def test_a_flipped_byte_is_named_by_shard_row_and_field(root: Path) -> None:
    cache = open_cache(root, check_digests=True)
    rows = list(ok_rows(cache))
    sample = rows[20]
    for field in cache.manifest.fields:
        for run, byte in {(0, 0), (-1, -1)}:
            path, offset = place(cache, sample, field, run, byte)
            flip(path, offset)
            said = rf"{path}: {field.name} of dataset row {sample} is damaged.*verify .* --repair"
            with pytest.raises(IncompatibleCacheError, match=said):
                read(cache, [field], rows)
            with pytest.raises(IncompatibleCacheError, match=said):
                cache[sample]
            others = [f for f in cache.manifest.fields if f != field]
            assert read(cache, others, rows) == rows
            if field.name not in ID_LIMITS:  # whose flipped ids their tables do not have
                assert read(open_cache(root), [field], rows) == rows
            flip(path, offset)
    assert read(cache, list(cache.manifest.fields), rows) == rows


def test_padding_is_not_looked_at(root: Path) -> None:
    cache = open_cache(root, check_digests=True)
    sample = next(int(row) for row in ok_rows(cache) if cache.lengths[row] < 32)
    want = cache[sample]
    for field in cache.manifest.fields:
        path, offset = place(cache, sample, field, 0, -1)
        flip(path, offset + 1)
    got = cache[sample]
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("name", ID_LIMITS)
def test_ids_beyond_their_table_are_named_without_digests(root: Path, name: str) -> None:
    cache = open_cache(root)
    field, sample = cache.field(name), list(ok_rows(cache))[20]
    path, offset = place(cache, sample, field, 0, -4)  # its last id
    for written, refused in ((ID_LIMITS[name], True), (-1, True), (ID_LIMITS[name] - 1, False)):
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), struct.pack("<i", written), offset)
        if refused:
            said = rf"{path}: {name} of dataset row {sample} is damaged.* in 0..47; .*--repair"
            with pytest.raises(IncompatibleCacheError, match=said):
                read(cache, [field], [sample])
        else:
            assert read(cache, [field], [sample]) == [sample]


def test_damaged_target_files_are_named(root: Path) -> None:
    flip(head_path(root), -9 + head_path(root).stat().st_size)
    assert len(open_cache(root))
    with pytest.raises(IncompatibleCacheError, match=rf"{head_path(root)}: damaged"):
        open_cache(root, check_digests=True)
    head_path(root).unlink()
    with pytest.raises(IncompatibleCacheError, match=rf"{head_path(root)}: No such file"):
        open_cache(root, check_digests=True)


@pytest.mark.parametrize("what", ["directory", "pipe", "link to /dev/zero"])
def test_what_is_no_file_in_target_is_refused(root: Path, what: str) -> None:
    path = head_path(root)
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(IncompatibleCacheError, match=rf"{path}: not a file"):
        open_cache(root, check_digests=True)


def test_training_stops_at_damage(root: Path, tmp_path: Path) -> None:
    cache = open_cache(root)
    for row in ok_rows(cache):
        flip(*place(cache, int(row), cache.field("last_hidden_state"), 0, 0))
    command = [
        *(sys.executable, "-m", "dspark", "train-draft", "--cache", str(root), "--arch", "msd"),
        *("--steps", "2", "--batch-size", "4", "--device", "cpu", "--out"),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "checked"), "--check-digests"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "last_hidden_state of dataset row" in done.stderr.splitlines()[-1]
