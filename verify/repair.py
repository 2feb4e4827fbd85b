"""Taking what is damaged out of a cache, so that a capture makes just that again."""

import stat
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.durable import fsync_dir, make_dir
from dspark.schemas.errors import InputError, UnreadableError
from dspark.schemas.manifest import Manifest, write_manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths, manifest_path
from dspark.schemas.stored_shard import remove_shard, shard_files, shard_place
from dspark.verify.deep import check_contents
from dspark.verify.faults import Fault, Unreadable
from dspark.verify.result import Verification
from dspark.verify.run import read_or_blame_manifest
from dspark.verify.shallow import check_shallow


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        shards: that are no longer committed.
        files: others that were removed, those of extensions among them.
        busy: damaged shards that were left alone, because a running capture is writing them.
        sound: files that were left alone, because they were sound when they were read once more.
    """

    shards: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    busy: tuple[int, ...] = ()
    sound: tuple[str, ...] = ()


def repair_cache(verification: Verification) -> Repair:
    """Remove what a verification found damaged and is damaged still, when it is read once more.

    The manifest stops calling what is damaged complete before anything is removed, and an index
    goes before its shard, so that a crash at any moment leaves a cache that a capture continues. A
    cache of which only an extension is damaged stays complete without it.

    Raises:
        InputError: a file cannot be read, which need not be damage, or a directory lies where a
            file belongs. Nothing was removed.
    """
    root, manifest = verification.root, verification.manifest
    _check_readable(root, verification.unreadable)
    for name in dict.fromkeys(fault.file for fault in verification.faults):
        _check_removable(root / name)
    faults = _still_there(verification)
    damaged = {_taken_with(fault) for fault in faults}
    sound = sorted({f.file for f in verification.faults if _taken_with(f) not in damaged})
    files = sorted({f.file for f in faults if f.shard is None})
    if manifest is None:
        if faults:
            _remove(manifest_path(root))
        return Repair(files=tuple(files), sound=tuple(sound))
    _reopen(root, manifest, {fault.part for fault in faults})
    files = [name for name in files if root / name != manifest_path(root)]
    for name in files:
        _remove(root / name)
    shards: list[int] = []
    busy: set[int] = set()
    for paths, part in parts(root, manifest):
        taken, claimed = _uncommit(paths, part, [f.shard for f in faults if f.part == paths.part])
        busy.update(claimed)
        if paths.part:
            files += [str(shard_place(paths, part, s).relative_to(root)) for s in taken]
        else:
            shards = taken
    return Repair(tuple(shards), tuple(files), tuple(sorted(busy)), tuple(sound))


def _taken_with(fault: Fault) -> tuple[int, int] | str:
    """What is taken out for a fault: a whole file of a shard and its index, or another file."""
    return fault.file if fault.shard is None else (fault.part, fault.shard)


def _check_readable(root: Path, unreadable: Sequence[Fault]) -> None:
    if unreadable:
        more = len({fault.file for fault in unreadable}) - 1
        raise InputError(
            f"{root / unreadable[0].file}: {unreadable[0].problem}"
            + (f", and {more:,} more files" if more else "")
            + ", so what is there may be sound; nothing was taken out: make all readable, or "
            "remove yourself what is lost for good"
        )


def _check_removable(path: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnreadableError(path, error) from None
    if is_directory:
        raise InputError(
            f"{path}: a directory lies in the place of a file; move it away; nothing was taken out"
        )


def _still_there(verification: Verification) -> list[Fault]:
    """The faults of damaged files that a second reading of them finds as well.

    Raises:
        InputError: now something cannot be read.
    """
    root, before = verification.root, verification.faults
    manifest = read_or_blame_manifest(root)
    if isinstance(manifest, Fault):
        return [manifest] if manifest in before else []
    if verification.manifest is None:
        return []
    damaged = {fault.file for fault in before}
    shards = {(fault.part, fault.shard) for fault in before}
    shallow = check_shallow(root, manifest)
    faults = shallow.faults
    if verification.deep:
        faults += check_contents(
            root,
            manifest,
            [
                [shard for shard in numbers if (part, shard) in shards]
                for part, numbers in enumerate(shallow.readable)
            ],
            [name for name in shallow.target_files if str(Path("target", name)) in damaged],
            lambda size: None,
        )
    _check_readable(root, [fault for fault in faults if isinstance(fault, Unreadable)])
    return [fault for fault in faults if fault.file in damaged]


def _reopen(root: Path, manifest: Manifest, damaged: Container[int]) -> None:
    """Write the manifest that was there before the last shard of each damaged part."""
    before = manifest
    if 0 in damaged:
        before = before.unfinished()
    for number, extension in enumerate(manifest.extensions, 1):
        if number in damaged:
            before = before.with_extension(number, replace(extension, complete=False))
    if before != manifest:
        write_manifest(root, before)


def _uncommit(
    paths: CachePaths, manifest: Manifest, damaged: Iterable[int | None]
) -> tuple[list[int], list[int]]:
    """Take damaged shards away: those taken, and those that a running capture has claimed."""
    taken, busy = [], []
    for shard in sorted({shard for shard in damaged if shard is not None}):
        data = paths.shard(shard)
        make_dir(data.parent)
        try:
            with Claim(data):
                _remove(paths.index(shard))
                for path in reversed(shard_files(paths, manifest, shard)):
                    _remove(path)
                remove_shard(paths, manifest, shard)  # the folders of a group
            taken.append(shard)
        except ClaimedError:
            busy.append(shard)
    return taken, busy


def _remove(path: Path) -> None:
    """Remove a file durably."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        fsync_dir(path.parent)
