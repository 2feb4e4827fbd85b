"""Whether the disk has room for a capture, before the first forward."""

import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest

_ESTIMATED_ROWS = 32
_PROBE = 1 << 20
"""Bytes of the file that shows whether holes take disk."""

_MARGIN = 0.8
"""An estimate from a few rows refuses only what clearly does not fit."""


def evenly_spaced(ranges: Sequence[range], count: int) -> list[int]:
    """Up to ``count`` numbers, spread evenly over several ranges."""
    ends = list(accumulate(map(len, ranges)))
    total = ends[-1] if ends else 0
    count = min(count, total)
    places = [i * total // count for i in range(count)]
    return [ranges[k := bisect_right(ends, place)][place - ends[k]] for place in places]


def check_room(
    manifest: Manifest,
    shards: Sequence[int],
    lengths_of: Callable[[Sequence[int]], Sequence[int]],
    root: Path,
) -> None:
    """Refuse a capture that the disk has clearly no room for.

    Args:
        manifest: of the unfinished cache.
        shards: still to capture.
        lengths_of: tokens of some dataset rows, 0 for those that are skipped; called only if
            padding would not fit.
        root: of the cache.

    Raises:
        InputError: with what is needed and what is free.
    """
    free = free_bytes(root)
    padded = len(shards) * manifest.shard_bytes
    if padded <= free:
        return
    if not keeps_holes(root):
        raise InputError(
            f"--out {root}: its file system keeps no holes, so padding takes room: the capture "
            f"needs {_size(padded)} and {_size(free)} are free there; make room, choose a disk "
            "with another file system (ext4, xfs, …), or store less (--max-length, --limit, "
            "--layers, --logits, --dtype)"
        )
    rows = [manifest.rows_of(shard) for shard in shards]
    lengths = lengths_of(evenly_spaced(rows, _ESTIMATED_ROWS))
    needed = sum(map(len, rows)) * sum(lengths) / max(1, len(lengths)) * token_bytes(manifest)
    if needed * _MARGIN > free:
        raise InputError(
            f"--out {root}: the capture needs about {_size(needed)} and {_size(free)} are free "
            "there; make room, choose another disk, or store less (--limit, --layers, --logits, "
            "--dtype)"
        )


def keeps_holes(root: Path) -> bool:
    """Whether unwritten parts of a file take no disk where a folder lies, or will lie.

    True also where nothing can be written to find out.
    """
    try:
        with TemporaryFile(dir=_existing(root), buffering=0) as probe:
            probe.truncate(_PROBE - 1)
            probe.seek(_PROBE - 1)
            probe.write(b"\0")
            os.fsync(probe.fileno())
            return os.fstat(probe.fileno()).st_blocks * 512 < _PROBE
    except OSError:
        return True


def token_bytes(manifest: Manifest) -> int:
    """Bytes that one token takes at least, over all fields."""
    return sum(field.token_bytes for field in manifest.fields if field.where is None)


def free_bytes(root: Path) -> int:
    """Free bytes of the disk that holds, or will hold, a folder."""
    return shutil.disk_usage(_existing(root)).free


def _existing(root: Path) -> Path:
    root = root.absolute()
    return next(p for p in (root, *root.parents) if p.exists())


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
