"""The stream of batches, against plain reads with the safetensors library."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from synthetic_cache import write_cache
from torch import Tensor

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.stream import RING, BatchStream

SAMPLES = 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    root = tmp_path_factory.mktemp("stream") / "cache"
    return open_cache(
        write_cache(root, samples=SAMPLES, position_rows=3, logits="topk:4", dtype="bf16", shards=4)
    )


def plain(cache: Cache, name: str, rows: Sequence[int]) -> Tensor:
    """A field of some rows, trimmed to the longest of them, with zeros behind the others."""
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
    return torch.stack(out).narrow(1 + field.token_axis, 0, longest)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_batches_hold_what_safetensors_reads(cache: Cache, data: st.DataObject) -> None:
    rows = st.sampled_from(ok_rows(cache).tolist())
    batches = data.draw(st.lists(st.lists(rows, min_size=1, max_size=5), max_size=9))
    names = data.draw(
        st.lists(st.sampled_from([f.name for f in cache.manifest.fields]), unique=True, min_size=1)
    )
    fields = [cache.field(name) for name in names]
    seen = 0
    with BatchStream(cache, fields, batches, batch_size=5) as stream:
        for batch, wanted in zip(stream, batches, strict=True):
            assert set(batch) == {*names, "length", "sample"}
            assert batch["sample"].tolist() == wanted
            assert batch["length"].tolist() == cache.lengths[wanted].tolist()
            for name in names:
                expected = plain(cache, name, wanted)
                assert batch[name].dtype == expected.dtype
                assert torch.equal(batch[name], expected), name
            seen += sum(int(cache.lengths[r]) * f.token_bytes for r in wanted for f in fields)
            assert stream.bytes_read == seen


def test_a_buffer_that_held_long_rows_serves_short_ones(tmp_path: Path) -> None:
    lengths = [32] * 8 + [9, 20, 8, 32, 10, 11, 12, 13]
    root = write_cache(tmp_path / "cache", samples=16, shards=2, skip_every=0, lengths=lengths)
    cache = open_cache(root)
    batches = [[2 * i, 2 * i + 1] for i in range(8)]
    assert len(batches) > RING
    with BatchStream(cache, cache.manifest.fields, batches, batch_size=2) as stream:
        for batch, rows in zip(stream, batches, strict=True):
            for field in cache.manifest.fields:
                assert torch.equal(batch[field.name], plain(cache, field.name, rows))


def test_only_the_needed_bytes_are_read_from_the_files(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        counts.append(preadv(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    rows = ok_rows(cache).tolist()
    fields = [cache.field("hidden_states.2"), cache.field("loss_mask")]
    with BatchStream(cache, fields, [rows[:8], rows[8:16]], batch_size=8) as stream:
        assert len(list(stream)) == 2
    needed = sum(int(cache.lengths[row]) for row in rows[:16]) * (2 * 16 + 1)
    assert sum(counts) == stream.bytes_read == needed


def test_a_batch_stays_until_the_next_is_asked_for(cache: Cache) -> None:
    rows = ok_rows(cache).tolist()
    batches = [[row] for row in rows]
    with BatchStream(cache, [cache.field("hidden_states.0")], batches, batch_size=1) as stream:
        for batch in stream:
            before = batch["hidden_states.0"].clone()
            time.sleep(0.002)
            assert torch.equal(batch["hidden_states.0"], before)


def test_a_failed_read_is_raised_in_the_place_of_its_batch(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ok_rows(cache).tolist()
    real = cache.read_row

    def failing(sample: int, *rest: object) -> int:
        if sample == rows[5]:
            raise OSError(5, "Input/output error")
        return real(sample, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "read_row", failing)
    seen = []
    with (
        pytest.raises(OSError, match="Input/output error"),
        BatchStream(
            cache, [cache.field("loss_mask")], [[r] for r in rows[:9]], batch_size=1
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
        BatchStream(cache, fields, [[r] for r in range(40)], batch_size=1) as stream,
    ):
        for batch in stream:
            seen += batch["sample"].tolist()
    assert seen == list(range(30))


def test_a_ring_that_does_not_fit_into_memory_is_one_sentence(cache: Cache) -> None:
    """More than an address space, and more than torch can count."""
    for rows in (2**45, 2**62):
        with pytest.raises(InputError, match=f"--batch-size {rows}: .* give a smaller one"):
            BatchStream(cache, cache.manifest.fields, [], batch_size=rows)


def test_leaving_early_stops_the_threads(cache: Cache) -> None:
    rows = ok_rows(cache).tolist()
    with BatchStream(cache, cache.manifest.fields, [rows[:4]] * 50, batch_size=4) as stream:
        for _ in stream:
            assert readers()
            break
    assert not readers()


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dspark-read")]
