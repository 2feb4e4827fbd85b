"""Advisory locks that the operating system drops when their process dies (``flock``).

They work between the nodes of a cluster where the file system passes them on (NFS, GPFS, Lustre
mounted with ``flock``, …).
"""

import errno
import fcntl
import functools
import logging
import os
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def lock(fd: int, *, wait: bool = False) -> bool | None:
    """Lock an open file (opened for writing) until it is closed.

    Args:
        fd: its descriptor.
        wait: for another process that has it locked.

    Returns:
        Whether it is locked now; False if another process has it. None, after a warning, where the
        file system knows no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_of_no_locks()
        return None
    return True


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is (still) the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a live process has the file at ``path`` locked; False if there is none."""
    try:
        with open(path, "r+b", buffering=0) as file:
            return lock(file.fileno()) is False
    except FileNotFoundError:
        return False


@functools.cache
def _warn_of_no_locks() -> None:
    logging.getLogger(__name__).warning(
        "dspark: the file system of the cache has no file locks: let no two captures write there "
        "at the same time"
    )
