"""Layer numbers: published choices, shallow targets, one convention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.schemas.draft_layers import (
    DRAFTS,
    TRAINABLE,
    draft_layers,
    parse_drafts,
    spread_layers,
)
from dspark.schemas.errors import InputError
from dspark.schemas.layers import check_layers


def test_published_dspark_layers() -> None:
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]


@pytest.mark.parametrize("num_layers", [28, 32, 36, 61])
def test_published_eagle3_layers(num_layers: int) -> None:
    """Serving engines name the layers whose input is read: (2, N // 2, N - 3)."""
    engines = (2, num_layers // 2, num_layers - 3)
    assert draft_layers(["eagle3"], num_layers) == [k - 1 for k in engines]


def test_one_layer_is_the_middle_one() -> None:
    assert spread_layers(36, 1) == [18]


@given(st.integers(2, 200), st.integers(0, 12))
def test_layers_are_offered_and_distinct(num_layers: int, count: int) -> None:
    layers = spread_layers(num_layers, count)
    assert layers == check_layers(layers, num_layers)
    assert len(layers) == min(count, num_layers - 1)


@given(st.integers(2, 200), st.sampled_from(DRAFTS))
def test_every_draft_reads_layers_that_are_offered(num_layers: int, draft: str) -> None:
    layers = draft_layers([draft], num_layers)
    assert layers == check_layers(layers, num_layers)
    read = {"dflash": 5, "dspark": 5, "eagle3": 3}.get(draft, 0)
    assert len(layers) == min(read, num_layers - 1)


def test_several_drafts_get_the_union() -> None:
    assert draft_layers(["msd", "eagle3", "dspark"], 36) == [1, 9, 17, 25, 32, 33]


def test_auto_is_what_the_built_in_drafts_read() -> None:
    """A cache made with the defaults serves every draft that can be trained."""
    from dspark.train_from_cache.drafts import ARCHITECTURES

    assert set(ARCHITECTURES) == set(TRAINABLE) <= set(DRAFTS)


def test_an_unknown_draft_is_refused_with_those_that_are_known() -> None:
    assert parse_drafts("msd, eagle3") == ("msd", "eagle3")
    for names in ("msd,eagle4", "", "msd,"):
        with pytest.raises(InputError, match=rf"--drafts {names}: no draft .* choose .* eagle3, "):
            parse_drafts(names)


def test_the_last_layer_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="last_hidden_state"):
        check_layers([3], 4)
    with pytest.raises(InputError, match="4 decoder layers"):
        check_layers([4], 4)
    assert check_layers([2, -1, 2], 4) == [-1, 2]
