"""Whether the disk has room for a capture, before the first forward."""

import shutil
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest

_MARGIN = 0.8
"""An estimate from a few rows refuses only what clearly does not fit."""


def evenly_spaced(ranges: Sequence[range], count: int) -> list[int]:
    """Up to ``count`` numbers, spread evenly over several ranges."""
    ends = list(accumulate(map(len, ranges)))
    total = ends[-1] if ends else 0
    count = min(count, total)
    places = [i * total // count for i in range(count)]
    return [ranges[k := bisect_right(ends, place)][place - ends[k]] for place in places]


def may_not_fit(manifest: Manifest, rows: int, root: Path) -> bool:
    """Whether rows of ``--max-length`` tokens each would be more than the disk has free."""
    return rows * manifest.max_length * token_bytes(manifest) > free_bytes(root)


def check_room(manifest: Manifest, rows: int, lengths: Sequence[int], root: Path) -> None:
    """Refuse a capture that the disk has clearly no room for.

    Args:
        manifest: of the unfinished cache.
        rows: still to capture.
        lengths: tokens of some of them, evenly spaced; 0 for those that are skipped.
        root: of the cache.

    Raises:
        InputError: with what is needed and what is free.
    """
    needed = rows * sum(lengths) / max(1, len(lengths)) * token_bytes(manifest)
    free = free_bytes(root)
    if needed * _MARGIN > free:
        raise InputError(
            f"--out {root}: the capture needs about {_size(needed)} and {_size(free)} are free "
            "there; make room, choose another disk, or store less (--limit, --layers, --logits, "
            "--dtype)"
        )


def token_bytes(manifest: Manifest) -> int:
    """Bytes that one token takes, over all fields."""
    return sum(field.token_bytes for field in manifest.fields)


def free_bytes(root: Path) -> int:
    """Free bytes of the disk that holds, or will hold, a folder."""
    root = root.absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    return shutil.disk_usage(existing).free


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
