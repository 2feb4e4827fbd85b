"""Which rows are held out for evaluation."""

import numpy as np

from dspark.schemas.errors import InputError
from dspark.train_from_cache.rows import Rows

# Of xxh3-64.
_SECRET = np.uint64(0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE)
_PRIME = np.uint64(0x9FB21C651E98DF25)


def split_rows(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Split dataset rows into those to train on and those to evaluate on.

    A row is held out by a hash of its number alone, so every draft, seed and layer choice is
    measured on the same rows.

    Args:
        rows: dataset rows that hold a sample.
        fraction: about this share is held out; 0 holds out nothing.

    Returns:
        (training rows, held-out rows).

    Raises:
        InputError: ``fraction`` is out of range, or one side would be empty.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"--eval-fraction {fraction}: choose from 0 (nothing held out) to below 1")
    train = rows.where(lambda some: ~held_out(some, fraction))
    evaluation = rows.where(lambda some: held_out(some, fraction))
    if not train:
        raise InputError(
            f"no row left to train on: the cache holds {len(rows)} samples and --eval-fraction "
            f"{fraction} holds out {len(evaluation)}; capture more samples or lower it"
        )
    if fraction > 0 and not evaluation:
        raise InputError(
            f"--eval-fraction {fraction} holds out none of the {len(rows)} samples of this cache; "
            "raise it, or set it to 0 to train on all of them without an evaluation"
        )
    return train, evaluation


def held_out(rows: np.ndarray, fraction: float) -> np.ndarray:
    """Which dataset rows are held out. A smaller fraction holds out some of the same rows.

    Args:
        rows: int64 ``[n]``.
        fraction: of them, from 0 to below 1.

    Returns:
        bool ``[n]``.
    """
    return _digests(rows) < np.uint64(fraction * 2**64)


def _digests(rows: np.ndarray) -> np.ndarray:
    """xxh3-64 (seed 0) of each row number as 8 bytes, little-endian: uint64 ``[n]``.

    It is the algorithm's own case of 8 bytes, for all rows at once.
    """
    x = rows.astype(np.uint64)
    x = (x << np.uint64(32) | x >> np.uint64(32)) ^ _SECRET
    x ^= _rotated(x, 49) ^ _rotated(x, 24)
    x *= _PRIME
    x ^= (x >> np.uint64(35)) + np.uint64(8)
    x *= _PRIME
    return x ^ x >> np.uint64(28)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return x << np.uint64(bits) | x >> np.uint64(64 - bits)
