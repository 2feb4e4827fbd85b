"""What a full, lost or forbidden disk, or something else in a file's place, is told as."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PERMISSIONS = (errno.EROFS, errno.EACCES, errno.EPERM)
_SIZE = (errno.EFBIG,)
_LOST = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENODEV,
    errno.ENXIO,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.ENOENT,
)
_IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_NAME = (errno.ENAMETOOLONG,)
_WAYS_OUT = {
    _ROOM: "make room",
    _PERMISSIONS: "make it writable",
    _SIZE: "raise the limit on the size of files (ulimit -f, or that of the file system)",
    _LOST: "bring the disk or the mount back",
    _IN_THE_WAY: "move what has this name out of the way",
    _NAME: "take a shorter name",
}


def disk_error(error: OSError) -> str | None:
    """What failed, where, and the way out; None if it is no such error."""
    way_out = next((way for codes, way in _WAYS_OUT.items() if error.errno in codes), None)
    if way_out is None:
        return None
    name = error.filename2 or error.filename  # of a renaming, the new one
    where = f"{name}: " if name else ""
    return (
        f"{where}{error.strerror}; what is committed stays: {way_out} and give the same command "
        "again (train-draft: with --resume)"
    )


def is_unreadable(error: OSError) -> bool:
    """Whether an error of looking at or reading a file leaves open what is there.

    It does not where nothing is there, or something that is no file.
    """
    return error.errno not in (None, errno.ENOENT, errno.EISDIR, errno.EINVAL)


def how_to_read(error: OSError) -> str:
    """The way out where a file cannot be read."""
    ways = {**_WAYS_OUT, _PERMISSIONS: "make it readable"}
    return next((way for codes, way in ways.items() if error.errno in codes), "make it readable")


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise what Rust libraries make of a full disk and its like as the OSError that it was.

    Args:
        path: what was being written.
    """
    try:
        yield
    except Exception as error:  # each library has its own kind, some only Exception
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        code = int(found[1])
        raise OSError(code, os.strerror(code), str(path)) from None
