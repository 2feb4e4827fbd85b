"""A row's random numbers are its own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.train_from_cache.draft_parts.row_random import RowRandom

MASK, GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    """The published generator's next number, in Python's unbounded integers."""
    x = x + GAMMA & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@settings(max_examples=50)
@given(st.integers(0, 2**70), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(1, 3))
def test_the_numbers_are_splitmix64s(seed: int, step: int, sample: int, calls: int) -> None:
    key = splitmix64(splitmix64(seed & MASK) + step & MASK) + sample & MASK
    random = RowRandom(seed, step, torch.tensor([sample]))
    for _ in range(calls):
        key = splitmix64(key)
        got = random.uniform(2, 3)
        want = [splitmix64(key + i * GAMMA) >> 40 for i in range(6)]
        assert got.flatten().tolist() == [x / 2**24 for x in want]


def test_neither_padding_nor_other_rows_matter() -> None:
    together = RowRandom(3, 7, torch.tensor([5, 9, 2]))
    alone = RowRandom(3, 7, torch.tensor([9]))
    for shape in ((), (4,)):
        wide, narrow = together.uniform(10, *shape), alone.uniform(6, *shape)
        assert wide.shape == (3, 10, *shape) and wide.dtype == torch.float32
        assert torch.equal(wide[1, :6], narrow[0])
    assert RowRandom(3, 7, torch.zeros(0, dtype=torch.int64)).uniform(5).shape == (0, 5)


def test_seed_step_row_and_call_each_change_all_numbers_and_each_stream_is_uniform() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    streams = []
    for seed, step, sample in keys:
        random = RowRandom(seed, step, torch.tensor([sample]))
        streams += [random.uniform(20_000)[0], random.uniform(20_000)[0]]
    x = torch.stack(streams).double()
    assert x.min() >= 0 and x.max() < 1
    assert (x.mean(1) - 0.5).abs().max() < 0.01 and (x.var(1) - 1 / 12).abs().max() < 0.003
    assert (torch.corrcoef(x) - torch.eye(len(x))).abs().max() < 0.03
    lagged = torch.corrcoef(torch.cat([x[:, 1:], x[:, :-1]]))
    assert (lagged - torch.eye(len(lagged))).abs().max() < 0.03
