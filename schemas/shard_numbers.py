"""Shards named on the command line."""

import re

from dspark.schemas.errors import InputError


def parse_shards(only: str, shards: int) -> tuple[int, ...]:
    """``3,7-9`` -> (3, 7, 8, 9).

    Args:
        only: the value of ``--only``.
        shards: N.

    Raises:
        InputError: it is none such, or names a shard that is not there.
    """
    chosen: set[int] = set()
    for part in only.split(","):
        if not (match := re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)):
            raise InputError(f"--only {only}: give shard numbers and ranges, such as 3,7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= shards:
            raise InputError(
                f"--only {only}: a cache of {shards} has shards 0 to {shards - 1}, and a range "
                "goes from the lower number to the higher"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))
