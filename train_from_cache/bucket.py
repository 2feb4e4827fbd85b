"""Batches of rows of like length: ``--bucket``."""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dspark.train_from_cache.shuffle import shuffle

if TYPE_CHECKING:
    from dspark.train_from_cache.order import Order

# The longer a pool, the more alike the rows of its batches, and the further apart they lie on disk.
MOST_STEPS = 64


class Bucketed:
    """An order whose batches are made anew of the rows of some steps at a time: a pool.

    The rows of a pool are sorted by length and cut into batches, which come in an order of their
    own. A pool lies within an epoch, so each row still comes once per epoch; the batch that crosses
    from one epoch to the next stays as it is. Like the order itself, all is a function of the step.
    """

    def __init__(
        self,
        order: "Order",
        lengths: np.ndarray,
        *,
        rows: int,
        batch_size: int,
        pool_rows: int,
        key: tuple[int, ...],
    ) -> None:
        """Bucket an order.

        Args:
            order: all rows once per epoch, epoch after epoch.
            lengths: int32 ``[M]``, tokens of each dataset row.
            rows: how many an epoch has.
            batch_size: B.
            pool_rows: about so many rows are sorted together, but at most ``MOST_STEPS`` batches.
            key: of the random stream.
        """
        self._order = order
        self._lengths = lengths
        self._rows = rows
        self._batch_size = batch_size
        self._steps = min(max(1, pool_rows // batch_size), MOST_STEPS)
        self._key = key
        self._pool = lru_cache(maxsize=2)(self._make_pool)

    def rows_of_step(self, step: int) -> list[int]:
        """Dataset rows of the batch of ``step``."""
        size = self._batch_size
        epoch = step * size // self._rows
        # The steps that lie within the epoch as a whole.
        first, end = -(-epoch * self._rows // size), (epoch + 1) * self._rows // size
        if not first <= step < end:
            return self._order.rows_of_step(step)
        pool, place = divmod(step - first, self._steps)
        start = first + pool * self._steps
        return self._pool(start, min(start + self._steps, end))[place]

    def _make_pool(self, start: int, end: int) -> list[list[int]]:
        """The batches of the steps from ``start`` to ``end``."""
        steps = [self._order.rows_of_step(step) for step in range(start, end)]
        rows = np.array(steps).reshape(-1)
        by_length = rows[np.argsort(self._lengths[rows], kind="stable")]
        batches = by_length.reshape(end - start, self._batch_size)
        made: list[list[int]] = batches[shuffle(end - start, (*self._key, start))].tolist()
        return made
