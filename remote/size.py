"""Sizes as people write them."""

import re

from dspark.schemas.errors import InputError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(option: str, text: str | int) -> int:
    """Bytes of a size such as ``200GB``, ``1.5TB`` or ``64GiB``.

    Raises:
        InputError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(text).strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise InputError(f"{option} {text}: give a size such as 200GB, 1.5TB or 64GiB")
    units = _BINARY if found[3] else _UNITS
    size = int(float(found[1]) * units[found[2].upper()])
    if size <= 0:
        raise InputError(f"{option} {text}: must be greater than 0")
    return size
