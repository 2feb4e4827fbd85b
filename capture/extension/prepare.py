"""What is done before and after the shards of an extension: its entry in the manifest."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dspark.capture.disk_room import check_room
from dspark.capture.extension.request import ExtensionRequest
from dspark.capture.finish import missing_shards
from dspark.capture.plan import CapturePlan
from dspark.capture.workers.job import restarts
from dspark.schemas.columns import read_columns
from dspark.schemas.commands import repair_command
from dspark.schemas.durable import fsync_dir, tmp_path
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.extension import Extension
from dspark.schemas.index import read_index
from dspark.schemas.leftovers import remove_leftovers
from dspark.schemas.locks import is_locked
from dspark.schemas.manifest import Manifest, identity_differences, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, columns_path, index_dir
from dspark.schemas.stored_shard import remove_shard, shard_files


def prepare_extension(request: ExtensionRequest, plan: CapturePlan) -> list[int]:
    """Enter the unfinished extension into the manifest; the cache stays complete without it.

    Returns:
        The shards that are committed.

    Raises:
        IncompatibleCacheError: an unfinished extension with other settings is there.
        InputError: the disk has clearly no room, or a capture is running.
    """
    root, number, part = request.settings.out, request.number, plan.manifest
    paths = CachePaths(root, part.num_shards, number)
    manifest = read_manifest(root)
    extension = request.extension(part.identity)
    if number <= len(manifest.extensions):
        if request.settings.overwrite and restarts() == 0:
            _delete(paths, manifest, manifest.extensions[number - 1])
        else:
            check_unfinished(request, manifest, extension)
    remove_leftovers(root)
    missing = missing_shards(part, paths)
    only = request.settings.only
    chosen = missing if only is None else sorted({*missing} & {*only})
    check_room(part, chosen, lambda rows: _lengths(root, request.manifest, rows), root)
    if (extended := manifest.with_extension(number, extension)) != manifest:
        write_manifest(root, extended)
    return sorted({*range(part.num_shards)} - {*missing})


def check_unfinished(request: ExtensionRequest, manifest: Manifest, extension: Extension) -> None:
    """Refuse to go on with an extension that was begun elsewhere.

    Args:
        request: for the extension.
        manifest: of the cache.
        extension: as it would be captured now.

    Raises:
        IncompatibleCacheError: an unfinished one has other settings.
    """
    for there in manifest.extensions[request.number - 1 : request.number]:
        if different := identity_differences(there.around, extension.around):
            raise IncompatibleCacheError(
                f"--out {request.settings.out}: it has an unfinished extension with other settings "
                f"({'; '.join(different)}); use those to finish it, or give --overwrite to delete "
                "what there is of it"
            )


def finish_extension(request: ExtensionRequest, plan: CapturePlan) -> Manifest:
    """Call the extension complete, all of whose shards are.

    Raises:
        IncompatibleCacheError: an index is damaged or says otherwise than the columns, or another
            extension has taken its place.
    """
    root, number, part = request.settings.out, request.number, plan.manifest
    paths = CachePaths(root, part.num_shards, number)
    columns = read_columns(root, request.manifest)
    for shard in range(part.num_shards):
        table, _ = read_index(paths, part, shard)
        if not columns.are_those_of(table, part.rows_of(shard)):
            raise IncompatibleCacheError(
                f"{paths.index(shard)}: it lists other rows than {columns_path(root).name}; run "
                f"'{repair_command(root)}' and this command again"
            )
    manifest = read_manifest(root)
    extension = replace(request.extension(part.identity), complete=True)
    there = manifest.extensions[number - 1] if number <= len(manifest.extensions) else None
    if there is None or replace(there, complete=True) != extension:
        raise IncompatibleCacheError(
            f"--out {root}: another extension was begun there meanwhile, and overwrites this one; "
            "run one after the other"
        )
    finished = manifest.with_extension(number, extension)
    if finished != manifest:
        write_manifest(root, finished)
    return finished


def _lengths(root: Path, manifest: Manifest, samples: Sequence[int]) -> list[int]:
    """Stored tokens of dataset rows."""
    lengths: list[int] = read_columns(root, manifest).length[samples].tolist()
    return lengths


def _delete(paths: CachePaths, manifest: Manifest, extension: Extension) -> None:
    """Delete the files of an unfinished extension, indexes first.

    The manifest is made right before where it called complete what lacks files.

    Raises:
        InputError: a capture is writing them.
    """
    shards = range(manifest.num_shards)
    part = manifest.parts[paths.part]
    files = [path for s in shards if (path := paths.index(s)).exists()]
    files += [path for s in shards for path in shard_files(paths, part, s) if path.exists()]
    for path in (*files, *(tmp_path(paths.shard(s)) for s in shards)):
        if is_locked(path):
            raise InputError(
                f"--overwrite: a capture is running in {paths.root} (it has {path.name} open); "
                "stop it first"
            )
    logging.getLogger(__name__).warning(
        "dspark: --overwrite deletes %d files of the unfinished extension plus%d (%s) in %s",
        len(files),
        paths.part,
        ", ".join(field.name for field in extension.fields),
        paths.root,
    )
    if extension.complete:
        unfinished = replace(extension, complete=False)
        write_manifest(paths.root, manifest.with_extension(paths.part, unfinished))
    for shard in shards:
        paths.index(shard).unlink(missing_ok=True)
    fsync_dir(index_dir(paths.root))
    for shard in shards:
        remove_shard(paths, part, shard)
