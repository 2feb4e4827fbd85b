"""Taking what is damaged out of a cache, so that a capture makes just that again."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.durable import fsync_dir, make_dir
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Counts, Manifest, write_manifest
from dspark.schemas.paths import CachePaths, manifest_path
from dspark.verify.faults import Fault
from dspark.verify.result import Verification


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        shards: that are no longer committed.
        files: others that were removed.
        busy: damaged shards that were left alone, because a running capture is writing them.
    """

    shards: tuple[int, ...]
    files: tuple[str, ...]
    busy: tuple[int, ...]


def repair_cache(verification: Verification) -> Repair:
    """Remove what a verification found damaged.

    The manifest stops calling the cache complete before anything is removed, and an index goes
    before its shard, so that a crash at any moment leaves a cache that a capture continues.

    Raises:
        InputError: a directory lies where a file belongs, or a file is there that cannot be opened,
            which need not be damage. Nothing was removed.
    """
    root, manifest, faults = verification.root, verification.manifest, verification.faults
    for name in dict.fromkeys(fault.file for fault in faults):
        _check_removable(root / name)
    files = sorted({f.file for f in faults if f.shard is None})
    if manifest is None:
        _remove(manifest_path(root))
        return Repair((), tuple(files), ())
    if faults and manifest.complete:
        _reopen(root, manifest)
    files = [name for name in files if root / name != manifest_path(root)]
    for name in files:
        _remove(root / name)
    shards, busy = _uncommit(CachePaths(root, manifest.num_shards), faults)
    return Repair(tuple(shards), tuple(files), tuple(busy))


def _check_removable(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(
            f"{path}: cannot be opened ({error.strerror}), so it may be sound; make it readable, "
            "or remove it yourself; nothing was taken out"
        ) from None
    try:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise InputError(
                f"{path}: a directory lies in the place of a file; move it away; nothing was taken "
                "out"
            )
    finally:
        os.close(file)


def _reopen(root: Path, manifest: Manifest) -> None:
    """Write the manifest that the capture had before its last shard."""
    write_manifest(root, replace(manifest, complete=False, counts=Counts(), head_error=None))


def _uncommit(paths: CachePaths, faults: Iterable[Fault]) -> tuple[list[int], list[int]]:
    """Take damaged shards away: those taken, and those that a running capture has claimed."""
    taken, busy = [], []
    for shard in sorted({fault.shard for fault in faults if fault.shard is not None}):
        data = paths.shard(shard)
        make_dir(data.parent)
        try:
            with Claim(data):
                _remove(paths.index(shard))
                _remove(data)
            taken.append(shard)
        except ClaimedError:
            busy.append(shard)
    return taken, busy


def _remove(path: Path) -> None:
    """Remove a file durably."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        fsync_dir(path.parent)
