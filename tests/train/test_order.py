"""The training order is a function of seed and step."""

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.order import WINDOW, Curriculum, StreamOrder, training_order
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.rows import Rows
from dspark.train_from_cache.shuffle import shuffle


def plan(**changes: object) -> Plan:
    options = {
        "arch": "msd", "steps": 20, "batch_size": 4, "lr": 1e-3, "warmup": 0.0, "seed": 0,
        "eval_fraction": 0.1, "curriculum": False, "zero_hidden_states": False,
        "save_every": 10, "log_every": 10, "accumulate": 1, "ema": None, "compile": False,
        "trim": False, "bucket": False,
        "init_from": None,
    }  # fmt: skip
    return Plan(**{**options, **changes})  # type: ignore[arg-type]


row_sets = st.sets(st.integers(0, 400), min_size=1, max_size=120).map(
    lambda s: np.array(sorted(s), np.int64)
)


def chosen(rows: np.ndarray, per_shard: int) -> Rows:
    wanted = np.zeros(401, bool)
    wanted[rows] = True
    return Rows(401, per_shard, lambda some: wanted[some])


def epoch_of(order: StreamOrder, epoch: int) -> np.ndarray:
    windows = len(order.window_ends(epoch))
    return np.concatenate([order.window(epoch, number) for number in range(windows)])


def whole_epoch(rows: np.ndarray, per_shard: int, key: tuple[int, ...], epoch: int) -> list[int]:
    """The order, made in one piece from all rows."""
    shards = [rows[rows // per_shard == shard] for shard in sorted({*rows // per_shard})]
    shuffled = [shards[i] for i in shuffle(len(shards), (*key, epoch))]
    found: list[int] = []
    for start in range(0, len(shuffled), WINDOW):
        window = np.concatenate(shuffled[start : start + WINDOW])
        found += window[shuffle(len(window), (*key, epoch, start + 1))].tolist()
    return found


@given(row_sets, st.integers(1, 50), st.integers(1, 200), st.integers(0, 9))
def test_rows_come_as_if_each_epoch_were_made_in_one_piece(
    rows: np.ndarray, per_shard: int, batch: int, seed: int
) -> None:
    order = StreamOrder(chosen(rows, per_shard), batch, (0, seed))
    whole = [row for epoch in range(3) for row in whole_epoch(rows, per_shard, (0, seed), epoch)]
    for step in range(len(whole) // batch):
        assert order.rows_of_step(step) == whole[step * batch : (step + 1) * batch]
    assert epoch_of(order, 1).tolist() == whole[len(rows) : 2 * len(rows)]


def test_no_more_than_a_window_is_held_of_a_million_rows() -> None:
    tracemalloc.start()
    order = StreamOrder(Rows(1_000_000, 250), 16, (0, 0))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for step in [*range(200), 200_000, 100_000]:
        order.rows_of_step(step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4000 * 100  # a number or two for each shard
    assert peak - held < 1_000_000


@given(row_sets, st.integers(1, 50), st.integers(1, 9), st.integers(-(2**40), 2**40))
def test_every_row_comes_once_per_epoch(
    rows: np.ndarray, per_shard: int, batch: int, seed: int
) -> None:
    order = StreamOrder(chosen(rows, per_shard), batch, (0, seed))
    steps = -(-3 * len(rows) // batch)
    stream = [row for step in range(steps) for row in order.rows_of_step(step)]
    assert all(len(order.rows_of_step(step)) == batch for step in range(steps))
    for epoch in range(3):
        assert sorted(stream[epoch * len(rows) : (epoch + 1) * len(rows)]) == rows.tolist()


@given(row_sets, st.integers(1, 50), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=8))
def test_a_step_gives_the_same_rows_from_wherever_it_is_asked(
    rows: np.ndarray, per_shard: int, batch: int, steps: list[int]
) -> None:
    some = chosen(rows, per_shard)
    in_turn = StreamOrder(some, batch, (0, 5))
    stream = [in_turn.rows_of_step(step) for step in range(61)]
    for step in steps:
        assert StreamOrder(some, batch, (0, 5)).rows_of_step(step) == stream[step]


def test_rows_stay_within_a_window_of_shards() -> None:
    per_shard = 10
    order = epoch_of(StreamOrder(Rows(400, per_shard), 1, (0, 0)), 0)
    size = WINDOW * per_shard
    for start in range(0, 400, size):
        assert len({row // per_shard for row in order[start : start + size].tolist()}) == WINDOW


def test_seeds_epochs_and_window_are_shuffled() -> None:
    order = StreamOrder(Rows(400, 10), 1, (0, 0))
    other = StreamOrder(Rows(400, 10), 1, (0, 1))
    assert epoch_of(order, 0).tolist() != epoch_of(order, 1).tolist()
    assert epoch_of(order, 0).tolist() != epoch_of(other, 0).tolist()
    first = epoch_of(order, 0)[:80].tolist()
    assert first != sorted(first)
    assert any(abs(a - b) > 10 for a, b in zip(first, first[1:], strict=False))


def test_the_order_never_changes() -> None:
    # A resumed training of an earlier version would see other rows.
    assert StreamOrder(Rows(12, 3), 12, (0, 7)).rows_of_step(0) == [
        2,
        5,
        6,
        9,
        3,
        10,
        1,
        0,
        8,
        7,
        11,
        4,
    ]


def test_curriculum_is_text_first_then_ever_more_pictures() -> None:
    steps = 4000
    rows = Rows(1000, 100)
    text = StreamOrder(rows.where(lambda some: some < 500), 4, (1, 3))
    pictures = StreamOrder(rows.where(lambda some: some >= 500), 4, (2, 3))
    kinds = Curriculum(text, pictures, steps, 3).pictures
    assert not kinds[: steps // 2].any()
    assert kinds[-1]
    quarters = kinds[steps // 2 :].reshape(4, -1).mean(1)
    assert np.abs(quarters - [1 / 8, 3 / 8, 5 / 8, 7 / 8]).max() < 0.06


@given(st.integers(1, 40), st.integers(0, 5))
def test_curriculum_serves_each_kind_in_its_own_order(steps: int, seed: int) -> None:
    rows_of_both = Rows(37, 5)
    text = StreamOrder(rows_of_both.where(lambda some: some < 20), 3, (1, seed))
    pictures = StreamOrder(rows_of_both.where(lambda some: some >= 20), 3, (2, seed))
    order = Curriculum(text, pictures, steps, seed)
    seen: Counter[bool] = Counter()
    for step in range(steps):
        rows = order.rows_of_step(step)
        kind = rows[0] >= 20
        assert all((row >= 20) == kind for row in rows)
        assert rows == (pictures if kind else text).rows_of_step(seen[kind])
        seen[kind] += 1


def test_curriculum_of_a_cache(tmp_path: Path) -> None:
    cache = open_cache(write_cache(tmp_path / "cache"))
    order = training_order(cache, ok_rows(cache), plan(curriculum=True))
    assert all(cache.image_tokens[order.rows_of_step(step)].max() == 0 for step in range(10))
    assert cache.image_tokens[order.rows_of_step(19)].min() > 0


@pytest.mark.parametrize(("text_every", "kind"), [(0, "text-only"), (1, "pictures")])
def test_curriculum_needs_both_kinds(tmp_path: Path, text_every: int, kind: str) -> None:
    cache = open_cache(write_cache(tmp_path / "cache", text_every=text_every))
    with pytest.raises(InputError, match=rf"--curriculum .*none of the .*{kind}"):
        training_order(cache, ok_rows(cache), plan(curriculum=True))
