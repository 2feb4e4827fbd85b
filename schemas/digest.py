"""The digests that a cache carries: of stored rows, of files, of JSON values. All are xxh3-64."""

import errno
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """What a file must be.

    Attributes:
        bytes: its size.
        digest: xxh3-64 (seed 0) of all its bytes, 16 hex digits.
    """

    bytes: int
    digest: str


def field_digest(*runs: bytes | memoryview) -> int:
    """xxh3-64 (seed 0) of the real bytes of one field of one row: its runs, one after another."""
    state = xxhash.xxh3_64()
    for run in runs:
        state.update(run)
    return state.intdigest()


def file_digest(path: Path) -> FileDigest:
    """Size and digest of a file, read in pieces.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    state = xxhash.xxh3_64()
    size = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
            size += len(chunk)
    return FileDigest(size, state.hexdigest())


def same_sizes(folder: Path, files: Mapping[str, FileDigest]) -> bool:
    """Whether each of ``files``, named relative to ``folder``, is there with its size."""
    try:
        stats = [(folder / name).stat() for name in files]
    except OSError:
        return False
    return all(
        stat.S_ISREG(found.st_mode) and found.st_size == file.bytes
        for found, file in zip(stats, files.values(), strict=True)
    )


def canonical_json(value: Any) -> bytes:
    """A JSON value with sorted keys, without white space, in ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def json_digest(value: Any) -> str:
    """xxh3-64 (seed 0) of a JSON value in its canonical form, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(canonical_json(value))
