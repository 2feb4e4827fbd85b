"""How many tokens and bytes a data set takes, from some of its rows: the stated error is honest."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.capture.estimate.room import Fit, Room
from dspark.capture.estimate.rows import SAMPLED_ROWS, RowEstimate, extrapolate, sampled_rows
from dspark.capture.estimate.sizes import row_disk_bytes, shard_sizes
from dspark.capture.estimate.speed import Speed, busiest_worker_share
from dspark.schemas.fields import build_fields
from dspark.schemas.shard_layout import ShardLayout

ROWS = 20_000


def estimate(lengths: np.ndarray, chosen: list[int]) -> RowEstimate:
    """From chosen rows of a data set with these lengths; 0 is a row that is skipped."""
    seen = [(row, int(lengths[row])) for row in chosen]
    skipped = [(row, "no assistant turn") for row, length in seen if length == 0]
    return extrapolate(len(lengths), Counter(n for _, n in seen if n), 0, 0, skipped)


@given(st.integers(1, 5000), st.integers(0, 3))
def test_sampled_rows_are_spread_evenly(rows: int, seed: int) -> None:
    chosen = sampled_rows(rows, seed)
    count = min(rows, SAMPLED_ROWS)
    assert len(chosen) == count
    for i, row in enumerate(chosen):
        assert i * rows // count <= row < (i + 1) * rows // count


def lognormal(draw: np.random.Generator) -> np.ndarray:
    return np.minimum(draw.lognormal(5, 1, ROWS).astype(int) + 1, 4096)


def few_long_ones(draw: np.random.Generator) -> np.ndarray:
    """One row in fifty is forty times as long as the others, one in ten cannot be captured."""
    lengths = np.where(draw.random(ROWS) < 0.02, 4000, 100)
    return np.where(draw.random(ROWS) < 0.1, 0, lengths)


def sorted_by_length(draw: np.random.Generator) -> np.ndarray:
    return np.sort(lognormal(draw))


def periodic(draw: np.random.Generator) -> np.ndarray:
    """Repeats with the period of a sample of every k-th row, which would see one phase of it."""
    period = ROWS // SAMPLED_ROWS
    return 50 + 10 * (np.arange(ROWS) % period) + draw.integers(0, 20, ROWS)


@pytest.mark.parametrize("data", [lognormal, few_long_ones, sorted_by_length, periodic])
def test_the_error_is_within_what_is_stated(
    data: Callable[[np.random.Generator], np.ndarray],
) -> None:
    lengths = data(np.random.default_rng(0))
    truth = lengths.sum()
    hits = widths = 0.0
    for seed in range(400):
        found = estimate(lengths, sampled_rows(ROWS, seed))
        hits += abs(found.counts.tokens - truth) <= found.relative_error * found.counts.tokens
        widths += found.relative_error / 400
    assert hits / 400 >= 0.9, "of 95 %; skewed data has longer tails than a normal distribution"
    # not by stating anything: as wide as theory says of so many rows drawn at random, no wider
    expected = 1.96 * lengths.std() / lengths.mean() / SAMPLED_ROWS**0.5
    assert widths == pytest.approx(expected, rel=0.15)


def test_all_rows_have_no_error() -> None:
    lengths = lognormal(np.random.default_rng(0))[:100]
    lengths[7] = 0
    found = estimate(lengths, list(range(100)))
    assert found.relative_error == 0
    assert found.counts.tokens == lengths.sum()
    assert found.counts.ok == 99
    assert found.counts.skipped == {"no assistant turn": 1}


def test_skipped_rows_are_extrapolated_and_named() -> None:
    lengths = np.full(ROWS, 10)
    lengths[::4] = 0
    found = estimate(lengths, sampled_rows(ROWS))
    assert found.counts.skipped["no assistant turn"] == pytest.approx(ROWS / 4, rel=0.3)
    assert found.counts.ok + found.counts.skipped["no assistant turn"] == ROWS
    assert all(row % 4 == 0 for row in found.skipped[0].rows)


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=9),
    st.sampled_from([512, 700, 1024]),
    st.sampled_from([8, 64, 96]),
    st.sampled_from([1, 3]),
)
def test_disk_bytes_are_the_blocks_that_rows_touch(
    lengths: list[int], max_length: int, hidden_size: int, position_rows: int
) -> None:
    """Against a count of touched blocks: never much more, and less only by blocks that straddle."""
    lengths = [min(n, max_length) for n in lengths]
    fields = build_fields(
        max_length=max_length,
        hidden_size=hidden_size,
        vocab_size=50,
        layers=[1],
        dtype="bf16",
        logits="head",
        position_rows=position_rows,
    )
    layout = ShardLayout(fields, len(lengths))
    blocks = set(range(len(layout.header) // 4096))
    runs = 0
    for row, length in enumerate(lengths):
        for field in fields:
            for offset, size in layout.row_extents(field, row, length):
                blocks.update(range(offset // 4096, (offset + size - 1) // 4096 + 1))
                runs += 1
    found = estimate(np.array(lengths), list(range(len(lengths))))
    sizes = shard_sizes(fields, found, num_shards=1, rows_per_shard=len(lengths))
    assert sizes.disk_bytes == len(layout.header) + sum(row_disk_bytes(fields, n) for n in lengths)
    assert sizes.real_bytes <= sizes.disk_bytes - len(layout.header)
    assert abs(sizes.disk_bytes - 4096 * len(blocks)) <= 4096 * runs


@pytest.mark.parametrize(
    ("disk", "file", "holes", "fit"),
    [
        (80, 100, False, Fit.FITS),
        (80, 101, False, Fit.NOT),
        (80, 101, True, Fit.FITS),
        (95, 500, True, Fit.UNSURE),
        (105, 500, True, Fit.UNSURE),
        (112, 500, True, Fit.NOT),
    ],
)
def test_whether_it_fits(disk: int, file: int, holes: bool, fit: Fit) -> None:
    assert Room(Path("c"), 100, holes, 1, disk, file, relative_error=0.1).fit == fit


def test_workers_take_whole_shards() -> None:
    assert [busiest_worker_share(10, n) for n in (1, 2, 8, 64)] == [1, 0.5, 0.2, 0.1]


def test_time_is_that_of_rows_and_of_tokens() -> None:
    speed = Speed("cpu", rows=10, row_seconds=2, batches=1, tokens=100, batch_seconds=5)
    assert speed.seconds(rows=1000, tokens=4000) == pytest.approx(200 + 200)
