"""Folders that are a cache, or lie in one."""

import os
from pathlib import Path

from dspark.schemas.errors import InputError
from dspark.schemas.paths import index_dir, manifest_path


def is_cache(folder: Path) -> bool:
    """Whether a folder looks like a cache, finished or not."""
    # Not Path.is_file, which fails where a folder cannot be searched.
    return os.path.isfile(manifest_path(folder)) and os.path.isdir(index_dir(folder))


def refuse_inside_cache(option: str, folder: Path, *, or_cache: bool = False) -> None:
    """Refuse a folder to write to that lies in a cache: a capture would not continue this any more.

    Args:
        option: that the folder was given as.
        folder: need not exist.
        or_cache: refuse one that is a cache, too.

    Raises:
        InputError: it lies in a cache, or is one.
    """
    real = Path(os.path.realpath(folder))
    for outer in (real, *real.parents) if or_cache else real.parents:
        if is_cache(outer):
            where = "it is a cache" if outer == real else f"it lies inside the cache {outer}"
            raise InputError(f"{option} {folder}: {where}; choose another one")
