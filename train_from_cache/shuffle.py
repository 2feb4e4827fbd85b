"""Randomness of the order of rows, the same in any version of numpy."""

import numpy as np


def shuffle(n: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation of ``range(n)``, int64 ``[n]``, the same for a key in any version of numpy."""
    return np.argsort(random_bits(n, key), kind="stable")


def random_bits(n: int, key: tuple[int, ...], start: int = 0) -> np.ndarray:
    """uint64 ``[n]``, a function of ``key`` alone: those from ``start`` on of an endless stream."""
    # numpy promises stable raw bits, not a stable Generator.permutation.
    bits = np.random.PCG64(np.random.SeedSequence([k % 2**64 for k in key]))
    return bits.advance(start).random_raw(n)
