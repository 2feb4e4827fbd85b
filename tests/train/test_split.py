"""Held-out rows depend on the row number alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.split import split_rows


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 3_999), min_size=200, max_size=300), st.floats(0.05, 0.9))
def test_a_row_is_held_out_whatever_other_rows_there_are(chosen: set[int], fraction: float) -> None:
    rows = np.array(sorted(chosen))
    train, held_out = split_rows(rows, fraction)
    assert sorted([*train, *held_out]) == rows.tolist()
    _, of_all = split_rows(np.arange(4_000), fraction)
    assert set(held_out) == set(of_all) & chosen
    assert abs(len(of_all) / 4_000 - fraction) < 0.03


def test_a_larger_fraction_holds_out_more_of_the_same() -> None:
    rows = np.arange(1000)
    _, few = split_rows(rows, 0.1)
    _, many = split_rows(rows, 0.2)
    assert set(few) < set(many)


def test_the_held_out_rows_never_change() -> None:
    # Numbers of earlier drafts would no longer compare.
    assert split_rows(np.arange(40), 0.1)[1].tolist() == [9, 16, 18, 19, 27, 31, 39]


def test_skipped_rows_are_in_neither_part(tmp_path) -> None:
    cache = open_cache(write_cache(tmp_path / "cache", samples=50, skip_every=3))
    train, held_out = split_rows(ok_rows(cache), 0.3)
    assert sorted([*train, *held_out]) == [i for i in range(50) if i % 3 != 2]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="--eval-fraction"):
        split_rows(np.arange(100), fraction)


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(InputError, match="holds out none of the 2 samples"):
        split_rows(np.arange(2), 0.01)
    with pytest.raises(InputError, match="no row left to train on"):
        split_rows(np.arange(2), 0.999)
    train, held_out = split_rows(np.arange(2), 0.0)
    assert len(train) == 2 and not len(held_out)
