"""A cache opened by a user: indexing, workers, files, damage."""

import os
import pickle
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_cache import write_cache
from torch.utils.data import DataLoader

import dspark
from dspark.schemas.commands import capture_command
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.manifest import write_manifest
from dspark.schemas.paths import CachePaths, shards_dir
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(write_cache(tmp_path / "cache", samples=200, shards=3))


def test_a_sample_is_found_by_any_integer(cache: Cache) -> None:
    row = int(ok_rows(cache)[100])
    want = cache[row]["input_ids"]
    for i in (row - 200, np.int8(row - 200), np.uint8(row), np.uint64(row), torch.tensor(row)):
        assert torch.equal(cache[i]["input_ids"], want)  # type: ignore[index]
    ids = cache.field("input_ids")
    out = torch.zeros(len(want), dtype=torch.int32)
    for i in (row, row - 200):
        assert cache.entry(i)["sample"] == row
        assert cache.read_row(i, ids, out.zero_()) == 4 * len(want)
        assert torch.equal(out, want)
    for i in (200, -201):
        for read in (cache.__getitem__, cache.entry, lambda i: cache.read_row(i, ids, out)):
            with pytest.raises(IndexError, match=f"sample {i} of a cache of 200"):
                read(i)
    for wrong in (1.0, "1", None, slice(3)):
        with pytest.raises(TypeError):
            cache[wrong]  # type: ignore[index]
    assert sum(1 for _ in cache) == 200  # type: ignore[attr-defined]


def test_a_tensor_that_does_not_hold_a_row_is_refused(cache: Cache) -> None:
    row = int(ok_rows(cache)[7])
    field, length = cache.field("last_hidden_state"), int(cache.lengths[row])
    width = field.row_shape[1]
    for out in (
        torch.zeros(length - 1, width),
        torch.zeros(length, width + 1),
        torch.zeros(length * width),
        torch.zeros(length, width, dtype=torch.float64),
        torch.zeros(length, width, dtype=torch.int32),
        torch.zeros(width, length).T,
    ):
        with pytest.raises(ValueError, match="last_hidden_state of row .* needs a contiguous CPU"):
            cache.read_row(row, field, out)
        assert not out.any()
    out = torch.zeros(length + 3, width)
    assert cache.read_row(row, field, out) == 4 * length * width
    assert torch.equal(out[:length], cache[row]["last_hidden_state"]) and not out[length:].any()


def test_a_cache_goes_to_the_workers_of_a_data_loader(cache: Cache) -> None:
    row = int(ok_rows(cache)[7])
    want = cache[row]["last_hidden_state"]
    assert torch.equal(pickle.loads(pickle.dumps(cache))[row]["last_hidden_state"], want)
    loader = DataLoader(
        cache,  # type: ignore[arg-type]
        batch_size=None,
        sampler=[row],
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert torch.equal(next(iter(loader))["last_hidden_state"], want)


def test_a_cache_says_what_it_is(cache: Cache) -> None:
    assert repr(cache) == (
        f"<Cache '{cache.root}' of 'synthetic': 200 rows, {len(cache.manifest.fields)} fields>"
    )
    with pytest.raises(dspark.InputError, match="--cache is empty"):
        open_cache("")


def test_closing_a_cache_closes_its_files(cache: Cache) -> None:
    def shards() -> int:
        links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
        folder = str(shards_dir(cache.root))
        return sum(folder in os.readlink(fd) for fd in links if fd.is_symlink())

    row = int(ok_rows(cache)[0])
    with cache:
        assert len(cache[row]["input_ids"])
        assert shards() == 1
    assert shards() == 0
    assert len(cache[row]["input_ids"])


def test_a_relative_path_outlives_a_change_of_directory(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache.root.parent)
    relative = open_cache("cache")
    monkeypatch.chdir("/")
    row = int(ok_rows(cache)[0])
    for opened in (relative, pickle.loads(pickle.dumps(cache))):
        assert torch.equal(opened[row]["input_ids"], cache[row]["input_ids"])


def test_an_unfinished_cache_is_refused_with_the_command_that_finishes_it(cache: Cache) -> None:
    root = cache.root
    manifest = replace(cache.manifest, complete=False, data="it's here.jsonl")
    write_manifest(root, manifest)
    with pytest.raises(IncompatibleCacheError, match="not finished") as error:
        open_cache(root)
    command = str(error.value).rpartition(": ")[2]
    assert command == capture_command(root, manifest)
    words = shlex.split(command)
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["dspark", "capture"]
    assert given["--data"] == "it's here.jsonl"
    assert (given["--target"], given["--shards"]) == ("synthetic", "3")
    assert given["--out"] == str(root)


@pytest.mark.parametrize("what", ["directory", "pipe", "cut", "another header"])
def test_what_is_not_the_shard_of_the_manifest_is_refused(cache: Cache, what: str) -> None:
    path = CachePaths(cache.root, 3).shard(0)
    if what == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif what == "another header":
        with open(path, "r+b") as file:
            file.write(b"\x07")
    else:
        path.unlink()
        path.mkdir() if what == "directory" else os.mkfifo(path)
    with pytest.raises(IncompatibleCacheError, match=rf"{path}: .*dspark verify .*--repair"):
        cache[0]


def test_a_missing_shard_is_named_with_the_way_out(cache: Cache) -> None:
    CachePaths(cache.root, 3).shard(0).unlink()
    with pytest.raises(
        IncompatibleCacheError, match="No such file.*dspark verify --cache .* --repair"
    ):
        cache[int(ok_rows(cache)[0])]
