"""A block sees what comes before its anchor, and itself; both implementations agree."""

import math
import warnings

import pytest
import torch

from dspark.train_from_cache.draft_parts.block_attention import (
    BlockLayout,
    block_attention,
    dense,
    flex,
)

ROWS, HEADS, KV_HEADS, LENGTH, SIZE, DIM = 2, 4, 2, 9, 3, 16


def case():
    generator = torch.Generator().manual_seed(0)
    anchor = torch.tensor([[1, 4, 7, 8], [0, 3, 0, 0]])
    keep = torch.tensor([[True, True, True, True], [True, True, False, False]])
    context_mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    context_mask[0, 2] = False
    context_mask[1, 6:] = False
    queries = anchor.shape[1] * SIZE

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = normal(ROWS, HEADS, queries, DIM)
    key, value = (normal(ROWS, KV_HEADS, LENGTH + queries, DIM) for _ in range(2))
    return query, key, value, BlockLayout(anchor, keep, context_mask, SIZE)


def by_loops(query, key, value, layout):
    out = torch.empty_like(query)
    for b in range(ROWS):
        for q in range(query.shape[2]):
            block = q // SIZE
            seen = [LENGTH + block * SIZE + k for k in range(SIZE)]
            if layout.keep[b, block]:
                before = range(int(layout.anchor[b, block]))
                seen += [s for s in before if layout.context_mask[b, s]]
            for h in range(HEADS):
                group = h // (HEADS // KV_HEADS)
                scores = [math.exp(query[b, h, q] @ key[b, group, s] / DIM**0.5) for s in seen]
                mix = sum(e * value[b, group, s] for e, s in zip(scores, seen, strict=True))
                out[b, h, q] = mix / sum(scores)
    return out


@pytest.mark.parametrize("attend", [dense, flex, block_attention])
def test_a_query_sees_its_context_and_its_block_and_nothing_else(attend):
    query, key, value, layout = case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex attention says that it is slow uncompiled
        got = attend(query, key, value, layout)
    assert got.isfinite().all()
    # float64 sums of at most 11 terms, in another order.
    torch.testing.assert_close(got, by_loops(query, key, value, layout), atol=1e-12, rtol=0)


def test_flex_equals_dense_in_float32_over_more_than_one_tile():
    generator = torch.Generator().manual_seed(1)
    rows, blocks, length = 2, 50, 200
    anchor = torch.randint(0, length, (rows, blocks), generator=generator).sort().values
    keep = torch.rand(rows, blocks, generator=generator) > 0.2
    mask = torch.rand(rows, length, generator=generator) > 0.1
    layout = BlockLayout(anchor, keep, mask, SIZE)
    query = torch.randn(rows, HEADS, blocks * SIZE, DIM, generator=generator)
    shape = (rows, KV_HEADS, length + blocks * SIZE, DIM)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = flex(query, key, value, layout)
    # Averages of values of size 1 over at most 203 keys: some float32 roundings of 6e-8 apart.
    torch.testing.assert_close(got, dense(query, key, value, layout), atol=2e-6, rtol=0)
