"""Files that are there whole or not at all, also after a crash or a power cut.

A file is written under a temporary name (see ``is_tmp``) and is locked for as long as its writer
lives: what bears such a name and is not locked, a dead process left.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from dspark.schemas.locks import is_at, lock

TMP_SUFFIX = ".tmp"
_TMP_NAME = re.compile(r".+\.(safetensors|[0-9a-f]{8})\.tmp")


def fsync_dir(path: Path) -> None:
    """Make the names in directory ``path`` durable, where the file system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with names(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # CIFS and others say so
            raise
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Make directory ``path``, and those above it, durably."""
    if path.is_dir():
        return
    make_dir(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def tmp_path(final: Path) -> Path:
    """Where ``final`` is written before it is published, if no two processes write it at once."""
    return final.with_name(final.name + TMP_SUFFIX)


def publish(final: Path) -> None:
    """Turn the finished and fsynced ``tmp_path(final)`` into ``final``."""
    os.replace(tmp_path(final), final)
    fsync_dir(final.parent)


def is_tmp(path: Path) -> bool:
    """Whether a name is one that files have before they are published."""
    return _TMP_NAME.fullmatch(path.name) is not None


@contextmanager
def replacing(final: Path) -> Iterator[FileIO]:
    """A new file that becomes ``final``, atomically and durably, when the block ends.

    Its temporary name is its own, so several processes may write ``final`` at once: the last one
    wins. If the block raises, ``final`` is left as it was and nothing else remains.
    """
    tmp, file = _new_locked_file(final)
    with file:
        try:
            with names(final):
                yield file
                os.fsync(file.fileno())
            os.replace(tmp, final)
        except BaseException:
            with suppress(OSError):
                tmp.unlink()
            raise
        fsync_dir(final.parent)


def write_file(final: Path, data: bytes) -> None:
    """Write ``data`` to ``final`` atomically and durably."""
    with replacing(final) as file:
        write_all(file, data)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of ``data`` (views are of bytes), which an unbuffered file may take in parts."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def write_at(file: FileIO, data: memoryview, offset: int, *, stays: bool = True) -> None:
    """Write bytes at a place of a file. Several threads may write.

    Args:
        file: where.
        data: a view of bytes.
        offset: of the first.
        stays: let the system begin to bring them to the disk at once, so that a later fsync need
            not wait for all of the file.
    """
    start, size = offset, len(data)
    while data:
        done = os.pwrite(file.fileno(), data, offset)
        data, offset = data[done:], offset + done
    if stays:
        with suppress(OSError):  # not every file system takes advice
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


@contextmanager
def names(path: Path) -> Iterator[None]:
    """Give an OSError that comes without a file name, as those of open files do, this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _new_locked_file(final: Path) -> tuple[Path, FileIO]:
    while True:
        tmp = final.with_name(f"{final.name}.{secrets.token_hex(4)}{TMP_SUFFIX}")
        file = FileIO(tmp, "xb")
        # Between its creation and its lock, a cleaner may have taken it for a leftover.
        lock(file.fileno(), wait=True)
        if is_at(file.fileno(), tmp):
            return tmp, file
        file.close()
