"""What the wide fields of a row must be, in pieces of any length."""

import numpy as np

from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest

# All ones in the exponent: an infinity or no number.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}


def value_problem(field: Field, data: memoryview, manifest: Manifest) -> str | None:
    """What is wrong with a piece of a wide field, or None.

    Args:
        field: the field.
        data: whole numbers of it, little-endian.
        manifest: of the cache.
    """
    if field.dtype in _EXPONENTS:
        unsigned, exponent = _EXPONENTS[field.dtype]
        bits = np.frombuffer(data, unsigned)
        return "a number is not finite" if (bits & exponent).max() == exponent else None
    ids = np.frombuffer(data, "<i4")
    if ids.min() < 0 or ids.max() >= manifest.target.vocab_size:
        return f"an id is beyond the {manifest.target.vocab_size:,} logits"
    return None
