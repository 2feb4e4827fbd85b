"""Layer numbers: published choices, shallow targets, one convention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schemas.errors import InputError
from dspark.schemas.layers import auto_layers, check_layers, spread_layers


def test_published_dspark_layers() -> None:
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]


def test_one_layer_is_the_middle_one() -> None:
    assert spread_layers(36, 1) == [18]


@given(st.integers(2, 200), st.integers(0, 12))
def test_layers_are_offered_and_distinct(num_layers: int, count: int) -> None:
    layers = spread_layers(num_layers, count)
    assert layers == check_layers(layers, num_layers)
    assert len(layers) == min(count, num_layers - 1)


def test_auto_is_what_the_drafts_read() -> None:
    """The union over the registry, so a cache made with the defaults serves every draft."""
    from dspark.schemas.layers import DEFAULT_LAYER_COUNTS, default_layers
    from dspark.train_from_cache.drafts import ARCHITECTURES

    assert set(ARCHITECTURES) == set(DEFAULT_LAYER_COUNTS)
    for n in (4, 28, 36):
        assert auto_layers(n) == sorted({k for a in ARCHITECTURES for k in default_layers(a, n)})


def test_the_last_layer_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="last_hidden_state"):
        check_layers([3], 4)
    with pytest.raises(InputError, match="4 decoder layers"):
        check_layers([4], 4)
    assert check_layers([2, -1, 2], 4) == [-1, 2]
