"""Which rows are held out for evaluation."""

import struct

import numpy as np
import xxhash

from dspark.schemas.errors import InputError


def split_rows(rows: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split dataset rows into those to train on and those to evaluate on.

    A row is held out by a hash of its number alone, so every draft, seed and layer choice is
    measured on the same rows.

    Args:
        rows: int64 ``[n]``, dataset rows that hold a sample.
        fraction: about this share is held out; 0 holds out nothing.

    Returns:
        (training rows, held-out rows), each in the order of ``rows``.

    Raises:
        InputError: ``fraction`` is out of range, or one side would be empty.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"--eval-fraction {fraction}: choose from 0 (nothing held out) to below 1")
    out = held_out(rows, fraction)
    train, evaluation = rows[~out], rows[out]
    if not len(train):
        raise InputError(
            f"no row left to train on: the cache holds {len(rows)} samples and --eval-fraction "
            f"{fraction} holds out {len(evaluation)}; capture more samples or lower it"
        )
    if fraction > 0 and not len(evaluation):
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
    threshold = int(fraction * 2**64)
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(struct.pack("<q", row)) < threshold for row in rows.tolist()),
        bool,
        len(rows),
    )
