"""Files that are there whole or not at all, also after a crash or a power cut."""

import os
from pathlib import Path

TMP_SUFFIX = ".tmp"


def fsync_dir(path: Path) -> None:
    """Make the names in directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tmp_path(final: Path) -> Path:
    """Where ``final`` is written before it is published."""
    return final.with_name(final.name + TMP_SUFFIX)


def publish(final: Path) -> None:
    """Turn the finished and fsynced ``tmp_path(final)`` into ``final``."""
    os.replace(tmp_path(final), final)
    fsync_dir(final.parent)


def write_file(final: Path, data: bytes) -> None:
    """Write ``data`` to ``final`` atomically and durably."""
    with open(tmp_path(final), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    publish(final)
