"""Some rows of a cache, found when they are asked for instead of held in memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np

Condition = Callable[[np.ndarray], np.ndarray]
"""Of dataset rows, int64 ``[n]``: which of them meet it, bool ``[n]``."""

_BLOCK = 1 << 16
"""Rows that are looked at together, so that they stay in the processor's cache."""


class Rows(Sequence[int]):
    """The rows of a dataset that meet some conditions, in their order.

    What is held is a number for each shard; the rows of a shard are found again whenever they are
    asked for. So a condition must say the same each time.

    Attributes:
        counts: int64 ``[N]``, how many there are in each shard.
    """

    def __init__(self, total: int, per_shard: int, *conditions: Condition) -> None:
        """Look at all rows once, and count.

        Args:
            total: M, rows of the dataset.
            per_shard: S.
            conditions: each is asked of the rows that meet those before it.
        """
        self._total = total
        self._per_shard = per_shard
        self._conditions = conditions
        self.counts = np.zeros(-(-total // per_shard), np.int64)
        for start in range(0, total, _BLOCK):
            shards = self._between(start, start + _BLOCK) // per_shard
            first = start // per_shard
            found = np.bincount(shards - first)
            self.counts[first : first + len(found)] += found
        self._size = int(self.counts.sum())
        self._recent = lru_cache(maxsize=2)(self.of_shard)

    def where(self, condition: Condition) -> "Rows":
        """Those that meet a further condition."""
        return Rows(self._total, self._per_shard, *self._conditions, condition)

    @cached_property
    def _ends(self) -> np.ndarray:
        """int64 ``[N]``: how many there are up to the end of each shard."""
        return np.cumsum(self.counts)

    def of_shard(self, shard: int) -> np.ndarray:
        """Those of a shard: int64, sorted."""
        return self._between(shard * self._per_shard, (shard + 1) * self._per_shard)

    def _between(self, start: int, stop: int) -> np.ndarray:
        rows = np.arange(start, min(stop, self._total))
        for condition in self._conditions:
            rows = rows[condition(rows)]
        return rows

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for shard in range(len(self.counts)):
            yield from self.of_shard(shard).tolist()

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        place = range(len(self))[place]
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return int(self._recent(shard)[place - self._ends[shard]])  # counted from its end

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of them at once, int64 ``[len]``."""
        rows = self._between(0, self._total)
        return rows if dtype is None else rows.astype(dtype)
