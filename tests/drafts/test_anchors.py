"""Anchors are a uniform draw of candidates."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.train_from_cache.batch import Anchors
from dspark.train_from_cache.draft_parts.block_anchors import draw_anchors
from dspark.train_from_cache.draft_parts.packed_anchors import pack_anchors
from dspark.train_from_cache.draft_parts.row_random import RowRandom


def random(mask, seed):
    return RowRandom(seed, 0, torch.arange(len(mask)))


@st.composite
def candidate_masks(draw):
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(bits, min_size=rows, max_size=rows)))


@settings(max_examples=200)
@given(candidate_masks(), st.integers(1, 25), st.integers(0, 2**31), st.booleans())
def test_anchors_are_distinct_candidates_in_order_as_many_as_asked(mask, count, seed, trim):
    position, keep = draw_anchors(mask, count, random(mask, seed), trim=trim)
    again, _ = draw_anchors(mask, count, random(mask, seed), trim=trim)
    assert torch.equal(position, again)
    most = max(int(mask.sum(1).max()), 1)
    assert position.shape == keep.shape == (len(mask), min(count, most) if trim else count)
    for row in range(len(mask)):
        wanted = torch.nonzero(mask[row]).flatten().tolist()
        kept = position[row][keep[row]].tolist()
        assert len(kept) == min(count, len(wanted))
        assert kept == sorted(set(kept)) and set(kept) <= set(wanted)
        assert keep[row].tolist() == sorted(keep[row].tolist(), reverse=True), "padding comes last"
        assert not position[row][~keep[row]].any()


def test_every_candidate_is_as_likely_as_the_others():
    mask = torch.zeros(4000, 12, dtype=torch.bool)
    places = [0, 2, 3, 7, 10, 11]
    mask[:, places] = True
    position, keep = draw_anchors(mask, 2, random(mask, 0), trim=True)
    assert keep.all()
    share = torch.bincount(position.flatten(), minlength=12) / 4000
    # 2 of 6: one in three; the standard error of each share is 0.0075.
    assert all(abs(float(share[p]) - 1 / 3) < 0.03 for p in places)
    pairs = torch.bincount(position[:, 0] * 12 + position[:, 1])
    pairs = pairs[pairs > 0] / 4000
    assert len(pairs) == 15 and (pairs - 1 / 15).abs().max() < 0.016


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_packing_keeps_every_anchor_findable(places):
    row = torch.tensor([r for r, _ in places], dtype=torch.int64)
    position = torch.tensor([p for _, p in places], dtype=torch.int64)
    packed = pack_anchors(Anchors(row, position), 4)
    assert torch.equal(packed.row, row)
    assert torch.equal(packed.unpack(packed.position), position)
    assert int(packed.keep.sum()) == len(places)
    assert len({*zip(packed.row.tolist(), packed.column.tolist(), strict=True)}) == len(places)
