"""What the wide fields of a row must be, in pieces of any length."""

import numpy as np

from dspark.schemas.fields import Field, is_scale
from dspark.schemas.manifest import Manifest

# All ones in these bits: an infinity or no number.
_NOT_FINITE = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F8_E4M3": ("u1", 0x7F),
}


def value_problem(field: Field, data: memoryview, manifest: Manifest) -> str | None:
    """What is wrong with a piece of a wide field, or None.

    Args:
        field: the field.
        data: whole numbers of it, little-endian.
        manifest: of the cache.
    """
    if field.dtype in _NOT_FINITE:
        unsigned, ones = _NOT_FINITE[field.dtype]
        bits = np.frombuffer(data, unsigned)
        if (bits & ones).max() == ones:
            return "a number is not finite"
        if is_scale(field.name) and (np.frombuffer(data, "<f4") <= 0).any():
            return "a scale is not positive"
        return None
    ids = np.frombuffer(data, "<i4")
    if ids.min() < 0 or ids.max() >= manifest.target.vocab_size:
        return f"an id is beyond the {manifest.target.vocab_size:,} logits"
    return None
