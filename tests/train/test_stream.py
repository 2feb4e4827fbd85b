"""The stream of batches, against plain reads with the safetensors library."""

import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from synthetic_cache import write_cache
from torch import Tensor

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.part import Part
from dspark.train_from_cache.staging import Staging
from dspark.train_from_cache.stream import ADVISED, RING, BatchStream

SAMPLES = 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    root = tmp_path_factory.mktemp("stream") / "cache"
    return open_cache(
        write_cache(root, samples=SAMPLES, position_rows=3, logits="topk:4", dtype="bf16", shards=4)
    )


def plain(cache: Cache, name: str, rows: Sequence[int], trim: bool) -> Tensor:
    """A field of some rows with zeros behind them, perhaps trimmed to the longest of them."""
    field = cache.field(name)
    paths = CachePaths(cache.root, cache.manifest.num_shards)
    out = []
    for row in rows:
        shard, index = divmod(row, cache.manifest.rows_per_shard)
        with safe_open(paths.shard(shard), framework="pt") as file:
            tensor = file.get_slice(name)[index].clone()
        length = int(cache.lengths[row])
        size = tensor.shape[field.token_axis]
        assert not tensor.narrow(field.token_axis, length, size - length).any()
        out.append(tensor)
    longest = int(cache.lengths[list(rows)].max())
    stacked = torch.stack(out)
    return stacked.narrow(1 + field.token_axis, 0, longest) if trim else stacked


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), trim=st.booleans())
def test_batches_hold_what_safetensors_reads(cache: Cache, data: st.DataObject, trim: bool) -> None:
    rows = st.sampled_from(list(ok_rows(cache)))
    batches = data.draw(st.lists(st.lists(rows, min_size=1, max_size=5), max_size=9))
    names = data.draw(
        st.lists(st.sampled_from([f.name for f in cache.manifest.fields]), unique=True, min_size=1)
    )
    fields = [cache.field(name) for name in names]
    seen = 0
    with BatchStream(cache, fields, batches, batch_size=5, trim=trim) as stream:
        for batch, given_rows in zip(stream, batches, strict=True):
            assert set(batch) == {*names, "length", "sample"}
            wanted = batch["sample"].tolist()
            assert sorted(wanted) == sorted(given_rows)
            assert batch["length"].tolist() == cache.lengths[wanted].tolist()
            assert (batch["length"].diff() <= 0).all()
            for name in names:
                expected = plain(cache, name, wanted, trim)
                assert batch[name].dtype == expected.dtype
                assert torch.equal(batch[name], expected), name
            seen += sum(int(cache.lengths[r]) * f.token_bytes for r in wanted for f in fields)
            assert stream.bytes_read == seen


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_a_buffer_that_held_long_rows_serves_short_ones(
    tmp_path: Path, trim: bool, staged: bool
) -> None:
    """Where another device is to have the batches, the copies are made as here, on the CPU."""
    lengths = [32] * 8 + [9, 20, 8, 32, 10, 11, 12, 13]
    root = write_cache(tmp_path / "cache", samples=16, shards=2, skip_every=0, lengths=lengths)
    cache = open_cache(root)
    batches = [[2 * i, 2 * i + 1] for i in range(8)]
    assert len(batches) > RING
    fields = cache.manifest.fields
    with BatchStream(cache, fields, batches, batch_size=2, trim=trim) as stream:
        if staged:
            stream._staging = Staging(fields, 2, 32, torch.device("cpu"))
        for batch in stream:
            rows = batch["sample"].tolist()
            for field in fields:
                assert torch.equal(batch[field.name], plain(cache, field.name, rows, trim))


def test_only_the_needed_bytes_are_read_from_the_files(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        counts.append(preadv(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    rows = list(ok_rows(cache))
    fields = [cache.field("hidden_states.2"), cache.field("loss_mask")]
    with BatchStream(cache, fields, [rows[:8], rows[8:16]], batch_size=8, trim=True) as stream:
        assert len(list(stream)) == 2
    needed = sum(int(cache.lengths[row]) for row in rows[:16]) * (2 * 16 + 1)
    assert sum(counts) == stream.bytes_read == needed


def test_a_batch_stays_until_the_next_is_asked_for(cache: Cache) -> None:
    rows = list(ok_rows(cache))
    batches = [[row] for row in rows]
    with BatchStream(
        cache, [cache.field("hidden_states.0")], batches, batch_size=1, trim=True
    ) as stream:
        for batch in stream:
            before = batch["hidden_states.0"].clone()
            time.sleep(0.002)
            assert torch.equal(batch["hidden_states.0"], before)


def test_a_failed_read_is_raised_in_the_place_of_its_batch(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(ok_rows(cache))
    real = Part.read_row

    def failing(self: Part, sample: int, *rest: Any) -> int:
        if sample == rows[5]:
            raise OSError(5, "Input/output error")
        return real(self, sample, *rest)

    monkeypatch.setattr(Part, "read_row", failing)
    seen = []
    with (
        pytest.raises(OSError, match="Input/output error"),
        BatchStream(
            cache, [cache.field("loss_mask")], [[r] for r in rows[:9]], batch_size=1, trim=False
        ) as stream,
    ):
        for batch in stream:
            seen += batch["sample"].tolist()
    assert seen == rows[:5]
    assert not readers()


@pytest.mark.parametrize("harm", ["delete", "truncate"])
def test_a_shard_that_is_lost_in_the_middle_stops_the_stream(tmp_path: Path, harm: str) -> None:
    root = write_cache(tmp_path / "cache", samples=40, shards=4, skip_every=0)
    cache = open_cache(root)
    last = CachePaths(root, 4).shard(3)
    if harm == "delete":
        last.unlink()
    else:
        assert len(cache[35]["loss_mask"])  # open already, when it shrinks
        os.truncate(last, 8192)
    seen = []
    fields = [cache.field("loss_mask")]
    with (
        pytest.raises(IncompatibleCacheError, match=last.name),
        BatchStream(cache, fields, [[r] for r in range(40)], batch_size=1, trim=False) as stream,
    ):
        for batch in stream:
            seen += batch["sample"].tolist()
    assert seen == list(range(30))


def test_a_ring_that_does_not_fit_into_memory_is_one_sentence(cache: Cache) -> None:
    """More than an address space, and more than torch can count."""
    for rows, trim in itertools.product((2**45, 2**62), (False, True)):
        with pytest.raises(InputError, match=f"--batch-size {rows}: .* give a smaller one"):
            BatchStream(cache, cache.manifest.fields, [], batch_size=rows, trim=trim)


def test_the_system_is_told_of_rows_beyond_the_ring(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it makes of that, or a shard that is gone, changes no batch before its own."""
    told: list[tuple[int, int]] = []

    def refusing(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((offset, size))
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refusing)
    rows = ok_rows(cache)
    field = cache.field("hidden_states.1")
    layout = ShardLayout(cache.manifest.fields, cache.manifest.rows_per_shard)
    with BatchStream(cache, [field], [[row] for row in rows], batch_size=1, trim=True) as stream:
        assert next(iter(stream))["sample"].tolist() == [rows[0]]
        wanted = []
        for row in rows[: RING + ADVISED]:
            place, length = row % cache.manifest.rows_per_shard, int(cache.lengths[row])
            wanted += layout.row_extents(field, place, length)
        until = time.monotonic() + 5
        while len(told) < len(wanted) and time.monotonic() < until:
            time.sleep(0.001)
        assert sorted(told) == sorted(wanted)


def test_leaving_early_stops_the_threads(cache: Cache) -> None:
    rows = list(ok_rows(cache))
    with BatchStream(
        cache, cache.manifest.fields, [rows[:4]] * 50, batch_size=4, trim=True
    ) as stream:
        for _ in stream:
            assert readers()
            break
    assert not readers()


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dspark-read")]
