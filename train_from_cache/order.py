"""In which order rows are trained on: a pure function of seed and step."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from dspark.schemas.errors import InputError
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.plan import Plan

# Rows are shuffled within this many shards at a time, so that reads stay close together.
WINDOW = 8

# First word of the key of each random stream, so that no two of them share numbers.
_ALL, _TEXT, _PICTURES, _KIND = range(4)


class Order(Protocol):
    """What is trained on, step by step."""

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step`` (from 0); the same for any resumed run."""


def training_order(cache: Cache, rows: np.ndarray, plan: Plan) -> Order:
    """The order of a training.

    Args:
        cache: where the rows lie.
        rows: int64, sorted dataset rows to train on.
        plan: says batch size, steps, seed and whether to follow MSD's curriculum.

    Raises:
        InputError: a curriculum is asked for and the rows are all of one kind.
    """

    def stream(some: np.ndarray, name: int) -> StreamOrder:
        key = (name, plan.seed)
        return StreamOrder(some, cache.manifest.rows_per_shard, plan.batch_size, key)

    if not plan.curriculum:
        return stream(rows, _ALL)
    pictures = cache.image_tokens[rows] > 0
    for kind, some in (
        ("text-only rows", (~pictures).any()),
        ("rows with pictures", pictures.any()),
    ):
        if not some:
            raise InputError(
                f"--curriculum goes from text-only rows to rows with pictures, and none of the "
                f"{len(rows)} training rows of {cache.location} are {kind}; leave it out"
            )
    text, other = stream(rows[~pictures], _TEXT), stream(rows[pictures], _PICTURES)
    return Curriculum(text, other, plan.steps, plan.seed)


class StreamOrder:
    """All rows once per epoch, epoch after epoch, cut into batches that may cross the border.

    Shards are shuffled, then rows within each window of ``WINDOW`` shards.
    """

    def __init__(
        self, rows: np.ndarray, rows_per_shard: int, batch_size: int, key: tuple[int, ...]
    ) -> None:
        """Order sorted dataset rows.

        Args:
            rows: int64 ``[n]``, sorted, at least one.
            rows_per_shard: S of the cache.
            batch_size: B.
            key: of the random stream.
        """
        borders = np.flatnonzero(np.diff(rows // rows_per_shard)) + 1
        self._shards = np.split(rows, borders)
        self._size = len(rows)
        self._batch_size = batch_size
        self._key = key
        self._epoch = lru_cache(maxsize=2)(self.epoch)

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 ``[n]``: every row once, in the order of that epoch."""
        order = shuffle(len(self._shards), (*self._key, epoch))
        windows = []
        for start in range(0, len(order), WINDOW):
            rows = np.concatenate([self._shards[i] for i in order[start : start + WINDOW]])
            windows.append(rows[shuffle(len(rows), (*self._key, epoch, start + 1))])
        return np.concatenate(windows)

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step``."""
        epoch, start = divmod(step * self._batch_size, self._size)
        rows: list[int] = []
        while len(rows) < self._batch_size:
            missing = self._batch_size - len(rows)
            rows += self._epoch(epoch)[start : start + missing].tolist()
            epoch, start = epoch + 1, 0
        return rows


class Curriculum:
    """MSD's curriculum: in the first half of the steps text only; then the probability of a batch
    with pictures rises linearly from 0 to 1. A batch holds rows of one kind.

    Attributes:
        pictures: bool ``[steps]``, whether the batch of a step is one with pictures.
    """

    def __init__(self, text: Order, pictures: Order, steps: int, seed: int) -> None:
        half = steps // 2
        probability = np.clip((np.arange(steps) - half) / max(1, steps - 1 - half), 0, 1)
        draws = _bits(steps, (_KIND, seed)) / 2.0**64
        self.pictures = draws < probability
        self._text, self._pictures = text, pictures
        self._before: np.ndarray = np.cumsum(self.pictures) - self.pictures

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step``: the next ones of its kind."""
        earlier = int(self._before[step])
        if self.pictures[step]:
            return self._pictures.rows_of_step(earlier)
        return self._text.rows_of_step(step - earlier)


def shuffle(n: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation of ``range(n)``, int64 ``[n]``, the same for a key in any version of numpy."""
    return np.argsort(_bits(n, key), kind="stable")


def _bits(n: int, key: tuple[int, ...]) -> np.ndarray:
    # numpy promises stable raw bits, not a stable Generator.permutation.
    return np.random.PCG64(np.random.SeedSequence([k % 2**64 for k in key])).random_raw(n)
