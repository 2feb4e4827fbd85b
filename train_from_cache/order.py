"""In which order rows are trained on: a pure function of seed and step."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from dspark.schemas.errors import InputError
from dspark.train_from_cache.bucket import Bucketed
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.rows import Rows
from dspark.train_from_cache.shuffle import random_bits, shuffle

# Rows are shuffled within this many shards at a time, so that reads stay close together.
WINDOW = 8

# Steps of a curriculum that are drawn and counted together.
_BLOCK = 1 << 12

# First word of the key of each random stream, so that no two of them share numbers.
_ALL, _TEXT, _PICTURES, _KIND, _BUCKET = range(5)


class Order(Protocol):
    """What is trained on, step by step."""

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step`` (from 0); the same for any resumed run."""


def training_order(cache: Cache, rows: Rows, plan: Plan) -> Order:
    """The order of a training.

    Args:
        cache: where the rows lie.
        rows: dataset rows to train on.
        plan: says batch size, steps, seed, and whether to bucket and to follow MSD's curriculum.

    Raises:
        InputError: a curriculum is asked for and the rows are all of one kind.
    """

    def stream(some: Rows, name: int) -> Order:
        per_shard, size = cache.manifest.rows_per_shard, plan.batch_size
        order = StreamOrder(some, size, (name, plan.seed))
        if not plan.bucket:
            return order
        return Bucketed(
            order,
            cache.lengths,
            rows=len(some),
            batch_size=size,
            pool_rows=WINDOW * per_shard,
            key=(_BUCKET, name, plan.seed),
        )

    if not plan.curriculum:
        return stream(rows, _ALL)
    text = rows.where(lambda some: cache.image_tokens[some] == 0)
    pictures = rows.where(lambda some: cache.image_tokens[some] > 0)
    for kind, found in (("text-only rows", text), ("rows with pictures", pictures)):
        if not found:
            raise InputError(
                f"--curriculum goes from text-only rows to rows with pictures, and none of the "
                f"{len(rows)} training rows of {cache.location} are {kind}; leave it out"
            )
    return Curriculum(stream(text, _TEXT), stream(pictures, _PICTURES), plan.steps, plan.seed)


class StreamOrder:
    """All rows once per epoch, epoch after epoch, cut into batches that may cross the border.

    Shards are shuffled, then rows within each window of ``WINDOW`` shards. Of these, two are
    held, beside the order of the shards.
    """

    def __init__(self, rows: Rows, batch_size: int, key: tuple[int, ...]) -> None:
        """Order dataset rows.

        Args:
            rows: at least one.
            batch_size: B.
            key: of the random stream.
        """
        self._rows = rows
        self._shards = np.flatnonzero(rows.counts)
        self._batch_size = batch_size
        self._key = key
        self._epoch = lru_cache(maxsize=2)(self._shuffled_shards)
        self._window = lru_cache(maxsize=2)(self.window)

    def window(self, epoch: int, number: int) -> np.ndarray:
        """int64: the rows of a window of an epoch, in their order; both are counted from 0."""
        shards, _ = self._epoch(epoch)
        start = number * WINDOW
        rows = np.concatenate([self._rows.of_shard(i) for i in shards[start : start + WINDOW]])
        return rows[shuffle(len(rows), (*self._key, epoch, start + 1))]

    def window_ends(self, epoch: int) -> np.ndarray:
        """int64 ``[windows]``: rows of an epoch up to the end of each window."""
        return self._epoch(epoch)[1]

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step``."""
        epoch, place = divmod(step * self._batch_size, len(self._rows))
        rows: list[int] = []
        while len(rows) < self._batch_size:
            ends = self.window_ends(epoch)
            number = int(np.searchsorted(ends, place, side="right"))
            window = self._window(epoch, number)
            start = place - int(ends[number]) + len(window)
            some = window[start : start + self._batch_size - len(rows)].tolist()
            rows += some
            place += len(some)
            if place == len(self._rows):
                epoch, place = epoch + 1, 0
        return rows

    def _shuffled_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """int64: the shards that have rows, in the order of an epoch; and where windows end."""
        shards = self._shards[shuffle(len(self._shards), (*self._key, epoch))]
        is_last = np.arange(1, len(shards) + 1) % WINDOW == 0
        is_last[-1] = True
        return shards, np.cumsum(self._rows.counts[shards])[is_last]


class Curriculum:
    """MSD's curriculum: in the first half of the steps text only; then the probability of a batch
    with pictures rises linearly from 0 to 1. A batch holds rows of one kind.

    Attributes:
        pictures: bool ``[steps]``, whether the batch of a step is one with pictures.
    """

    def __init__(self, text: Order, pictures: Order, steps: int, seed: int) -> None:
        self.pictures = np.empty(steps, bool)
        self._text, self._pictures = text, pictures
        self._before = [0]  # each block
        half = steps // 2
        for start in range(0, steps, _BLOCK):
            block = np.arange(start, min(start + _BLOCK, steps))
            probability = np.clip((block - half) / max(1, steps - 1 - half), 0, 1)
            draws = random_bits(len(block), (_KIND, seed), start) / 2.0**64
            self.pictures[block] = draws < probability
            self._before.append(self._before[-1] + int(self.pictures[block].sum()))

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step``: the next ones of its kind."""
        block, rest = divmod(step, _BLOCK)
        earlier = self._before[block] + int(self.pictures[step - rest : step].sum())
        if self.pictures[step]:
            return self._pictures.rows_of_step(earlier)
        return self._text.rows_of_step(step - earlier)
