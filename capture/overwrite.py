"""``--overwrite``: delete the cache that is there, and nothing else."""

import logging
import re
from contextlib import suppress
from pathlib import Path

from dspark.schemas.durable import fsync_dir, is_tmp
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.leftovers import remove_leftovers
from dspark.schemas.locks import is_locked
from dspark.schemas.manifest import Manifest, read_manifest, write_manifest
from dspark.schemas.paths import (
    columns_path,
    index_dir,
    manifest_path,
    shards_dir,
    target_dir,
)

_BLOCK = 512  # the unit of st_blocks, whatever the file system's own
_STEM = r"shard-\d{5,}-of-\d{5,}(\.plus\d+)?"
_SHARD = re.compile(
    rf"{_STEM}\.safetensors|{_STEM}\.zarr/([^/]+/)?zarr\.json|{_STEM}\.zarr/[^/]+/c(\.0)+"
)
_INDEX = re.compile(rf"{_STEM}\.parquet")


def delete_cache(root: Path) -> None:
    """Delete the cache in ``root``, if there is one, after saying what it is.

    Deleted are the files that a capture writes. The manifest is made incomplete before, so that
    what is left of an interrupted deletion does not pass for a cache, and goes last.

    Raises:
        InputError: a capture is running there, or the directory holds something that is not ours.
    """
    if not root.is_dir() or not any(root.iterdir()):
        return
    try:
        manifest = read_manifest(root)
    except IncompatibleCacheError:
        manifest = None
    ours = _ours(root, manifest)
    for path in ours:
        if is_locked(path):
            raise InputError(
                f"--overwrite: a capture is running in {root} (it has {path.name} open); stop it "
                "first, or choose another --out"
            )
    _say(root, manifest, ours)
    if manifest is not None and manifest.complete:
        with suppress(OSError):  # no room for it; without its columns, no cache opens either
            write_manifest(root, manifest.unfinished())
    for folder in (index_dir(root), shards_dir(root), target_dir(root)):
        for path in ours:
            if folder in path.parents:
                path.unlink(missing_ok=True)
        if folder.is_dir():
            fsync_dir(folder)
    remove_leftovers(root)
    for path in sorted(shards_dir(root).rglob("*"), reverse=True):  # folders of groups
        with suppress(OSError):  # a hidden file that is not ours
            path.rmdir()
    manifest_path(root).unlink(missing_ok=True)
    fsync_dir(root)


def _ours(root: Path, manifest: Manifest | None) -> list[Path]:
    """The files of a cache, those of dead captures among them.

    Raises:
        InputError: there is another, or a link that leads out of the cache.
    """
    target_files = None if manifest is None else set(manifest.target_files)
    started = (
        shards_dir(root).is_dir() and index_dir(root).is_dir()
    )  # made before target/ is filled
    found = []
    for path in sorted(root.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise InputError(
                f"--overwrite: {path} is a link to another directory; delete the cache yourself, "
                "or choose another --out"
            )
        if path.is_dir() or path.name.startswith("."):
            continue
        known = (
            is_tmp(path)
            or path in (manifest_path(root), columns_path(root))
            or (
                shards_dir(root) in path.parents
                and _SHARD.fullmatch(path.relative_to(shards_dir(root)).as_posix())
            )
            or (path.parent == index_dir(root) and _INDEX.fullmatch(path.name))
            or (
                target_dir(root) in path.parents
                and (
                    started
                    if target_files is None
                    else path.relative_to(target_dir(root)).as_posix() in target_files
                )
            )
        )
        if not known:
            raise InputError(
                f"--overwrite: {path} is not of a capture that this one can read; delete it "
                "yourself, or choose another --out"
            )
        found.append(path)
    return found


def _say(root: Path, manifest: Manifest | None, files: list[Path]) -> None:
    indexes = [path for path in files if path.parent == index_dir(root)]
    committed = sum(".plus" not in path.name for path in indexes if path != columns_path(root))
    size = sum(path.lstat().st_blocks * _BLOCK for path in files)
    made = (
        "without a readable manifest"
        if manifest is None
        else f"of {manifest.num_shards}, captured from {manifest.target.id} with {manifest.data}"
    )
    logging.getLogger(__name__).warning(
        "dspark: --overwrite deletes the cache in %s: %d shards %s (%.1f MB on disk)",
        root,
        committed,
        made,
        size / 1e6,
    )
