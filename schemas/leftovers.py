"""What processes that died while they wrote a cache left behind."""

from pathlib import Path

from dspark.schemas.durable import is_tmp
from dspark.schemas.locks import is_at, lock


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files of dead processes from a cache, and no live one's."""
    for path in root.rglob("*"):
        if is_tmp(path) and path.is_file() and not path.is_symlink():
            _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    try:
        file = open(path, "r+b", buffering=0)  # noqa: SIM115
    except FileNotFoundError:  # published or removed meanwhile
        return
    with file:
        if lock(file.fileno()) and is_at(file.fileno(), path):
            path.unlink()
