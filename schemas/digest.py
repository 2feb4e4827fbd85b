"""The digest of a sample's stored bytes."""

from collections.abc import Iterable

import xxhash


def row_digest(runs: Iterable[memoryview]) -> int:
    """xxh3-64 (seed 0) of a row's stored bytes, field by field in file order, padding left out."""
    state = xxhash.xxh3_64()
    for run in runs:
        state.update(run)
    return state.intdigest()
