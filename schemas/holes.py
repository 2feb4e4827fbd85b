"""Which bytes of a row are written; the others are zero, and holes in the file."""

import numpy as np

from dspark.schemas.fields import Field


def written_ranges(field: Field, size: int, mask: np.ndarray | None) -> list[tuple[int, int]]:
    """The bytes to write of a run of a row, from and to.

    Args:
        field: the field.
        size: bytes of the run.
        mask: of a field that is not stored for all tokens, uint8 ``[L]`` of the mask ``where``.
    """
    if mask is None:
        return [(0, size)]
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return [
        (a * field.token_bytes, b * field.token_bytes) for a, b in edges.reshape(-1, 2).tolist()
    ]
