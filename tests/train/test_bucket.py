"""Batches of rows of like length."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import CONFIG, OPTIONS, assert_same_weights
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache import loop
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.bucket import MOST_STEPS, Bucketed
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.options import TrainTask
from dspark.train_from_cache.order import training_order
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.train import train_drafts


class PlainOrder:
    """Each epoch a permutation of ``range(n)``, cut into batches that may cross the border."""

    def __init__(self, n: int, batch_size: int, epochs: int = 5) -> None:
        drawn = np.random.default_rng(n)
        self.rows = np.concatenate([drawn.permutation(n) for _ in range(epochs)]).tolist()
        self.batch_size = batch_size

    def rows_of_step(self, step: int) -> list[int]:
        start = step * self.batch_size
        return self.rows[start : start + self.batch_size]


sizes = {"n": st.integers(1, 200), "batch": st.integers(1, 9), "pool": st.integers(0, 400)}


def bucketed(n: int, batch: int, pool: int, seed: int = 0) -> tuple[Bucketed, np.ndarray]:
    lengths = np.random.default_rng(seed).integers(1, 50, n, np.int32)
    key = (seed,)
    order = PlainOrder(n, batch)
    return (
        Bucketed(order, lengths, rows=n, batch_size=batch, pool_rows=pool, key=key),
        lengths,
    )


@given(**sizes)
def test_every_row_comes_once_per_epoch(n: int, batch: int, pool: int) -> None:
    order, _ = bucketed(n, batch, pool)
    steps = 3 * n // batch
    stream = [row for step in range(steps) for row in order.rows_of_step(step)]
    assert all(len(order.rows_of_step(step)) == batch for step in range(steps))
    for epoch in range(3):
        some = stream[epoch * n : (epoch + 1) * n]
        assert sorted(some) == list(range(n)) or len(some) < n


@given(**sizes, steps=st.lists(st.integers(0, 300), max_size=8))
def test_a_step_gives_the_same_rows_from_wherever_it_is_asked(
    n: int, batch: int, pool: int, steps: list[int]
) -> None:
    order, _ = bucketed(n, batch, pool)
    most = 4 * n // batch
    in_turn = [order.rows_of_step(step) for step in range(most)]
    for step in steps:
        if step < most:
            assert bucketed(n, batch, pool)[0].rows_of_step(step) == in_turn[step]


@given(**sizes)
def test_lengths_of_a_pools_batches_do_not_overlap(n: int, batch: int, pool: int) -> None:
    order, lengths = bucketed(n, batch, pool)
    steps = min(max(1, pool // batch), MOST_STEPS)
    for epoch in range(3):
        first, end = -(-epoch * n // batch), (epoch + 1) * n // batch
        for start in range(first, end, steps):
            of_pool = range(start, min(start + steps, end))
            drawn = [row for step in of_pool for row in PlainOrder(n, batch).rows_of_step(step)]
            batches = [lengths[order.rows_of_step(step)].tolist() for step in of_pool]
            assert sorted(sum(batches, [])) == sorted(lengths[drawn].tolist())
            batches.sort(key=lambda some: (min(some), max(some)))
            for shorter, longer in zip(batches, batches[1:], strict=False):
                assert max(shorter) <= min(longer)


def test_batches_of_a_pool_come_in_another_order_each_epoch() -> None:
    order, lengths = bucketed(512, 8, 512)
    means = [
        [lengths[order.rows_of_step(64 * epoch + step)].mean() for step in range(64)]
        for epoch in range(2)
    ]
    assert means[0] != means[1]
    for epoch in means:
        assert epoch != sorted(epoch) and epoch != sorted(epoch, reverse=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("bucket") / "cache", samples=120)


@pytest.mark.parametrize("curriculum", [False, True])
def test_less_of_a_batch_is_padding(cache: Path, curriculum: bool) -> None:
    opened = open_cache(cache)
    rows = ok_rows(opened)

    def padded(bucket: bool) -> tuple[int, list[list[int]]]:
        task = TrainTask(cache, "msd", epochs=4, batch_size=4, bucket=bucket, curriculum=curriculum)
        plan = Plan.of(task, len(rows))
        order = training_order(opened, rows, plan)
        batches = [order.rows_of_step(step) for step in range(plan.steps)]
        return sum(4 * int(opened.lengths[b].max()) for b in batches), batches

    (plain, before), (less, batches) = padded(False), padded(True)
    real = sum(int(opened.lengths[b].sum()) for b in batches)
    assert less - real < 0.4 * (plain - real)
    if curriculum:
        for some, other in zip(batches, before, strict=True):
            kinds = [set((opened.image_tokens[rows] > 0).tolist()) for rows in (some, other)]
            assert kinds[0] == kinds[1] and len(kinds[0]) == 1


def test_interrupted_and_resumed_gives_the_same_weights(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"bucket": True}
    config = {k: v for k, v in CONFIG.items() if k.startswith("dspark")}
    archs = ["msd", "dspark"]
    train_drafts(cache, archs, tmp_path / "whole", draft_config=config, **options)
    real = loop.step_random

    def stop(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == 8:
            raise RuntimeError("killed")
        return real(seed, step, batch)

    def go_on(**other: Any) -> None:
        train_drafts(cache, archs, tmp_path / "out", draft_config=config, **(options | other))

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(loop, "step_random", stop)
        go_on()
    with pytest.raises(InputError, match="--bucket: True there, False now"):
        go_on(resume=True, bucket=False)
    go_on(resume=True)
    for arch in archs:
        assert_same_weights(tmp_path / "out" / arch, tmp_path / "whole" / arch)
