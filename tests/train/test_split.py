"""Held-out rows depend on the row number alone."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.rows import Rows
from dspark.train_from_cache.split import _digests, held_out, split_rows


@settings(max_examples=30)
@given(st.sets(st.integers(0, 3_999), min_size=200, max_size=300), st.floats(0.05, 0.9))
def test_a_row_is_held_out_whatever_other_rows_there_are(chosen: set[int], fraction: float) -> None:
    rows = Rows(4_000, 70, lambda some: np.isin(some, [*chosen]))
    train, rest = split_rows(rows, fraction)
    assert sorted([*train, *rest]) == sorted(chosen)
    _, of_all = split_rows(Rows(4_000, 70), fraction)
    assert set(rest) == set(of_all) & chosen
    assert abs(len(of_all) / 4_000 - fraction) < 0.03


def test_a_larger_fraction_holds_out_more_of_the_same() -> None:
    rows = Rows(1000, 10)
    _, few = split_rows(rows, 0.1)
    _, many = split_rows(rows, 0.2)
    assert set(few) < set(many)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=50), st.floats(0, 0.999))
def test_rows_are_held_out_by_the_digest_of_their_number(rows: list[int], fraction: float) -> None:
    digests = [xxhash.xxh3_64_intdigest(struct.pack("<q", row)) for row in rows]
    expected = [digest < int(fraction * 2**64) for digest in digests]
    assert held_out(np.array(rows), fraction).tolist() == expected
    assert _digests(np.array(rows)).tolist() == digests


def test_the_held_out_rows_never_change() -> None:
    # Numbers of earlier drafts would no longer compare.
    assert list(split_rows(Rows(40, 3), 0.1)[1]) == [9, 16, 18, 19, 27, 31, 39]


def test_skipped_rows_are_in_neither_part(tmp_path) -> None:
    cache = open_cache(write_cache(tmp_path / "cache", samples=50, skip_every=3))
    train, rest = split_rows(ok_rows(cache), 0.3)
    assert sorted([*train, *rest]) == [i for i in range(50) if i % 3 != 2]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="--eval-fraction"):
        split_rows(Rows(100, 10), fraction)


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(InputError, match="holds out none of the 2 samples"):
        split_rows(Rows(2, 10), 0.01)
    with pytest.raises(InputError, match="no row left to train on"):
        split_rows(Rows(2, 10), 0.999)
    train, rest = split_rows(Rows(2, 10), 0.0)
    assert len(train) == 2 and not rest
