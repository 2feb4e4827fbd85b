"""A conversion from end to end."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.convert.options import ConvertOptions
from dspark.convert.planned import begun, planned
from dspark.convert.progress import ConvertProgress
from dspark.convert.shard import Conversion
from dspark.convert.workers import convert_shards
from dspark.schemas.columns import read_columns
from dspark.schemas.commands import repair_command, unfinished
from dspark.schemas.digest import FileDigest, file_digest
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.durable import is_tmp, make_dir, replacing, write_all
from dspark.schemas.errors import IncompatibleCacheError, InputError, UnreadableError
from dspark.schemas.leftovers import remove_leftovers
from dspark.schemas.manifest import (
    Manifest,
    identity_differences,
    read_manifest,
    write_manifest,
)
from dspark.schemas.nested import refuse_inside_cache
from dspark.schemas.options import checked, takes
from dspark.schemas.parts import parts
from dspark.schemas.paths import columns_path, index_dir, manifest_path, shards_dir, target_dir
from dspark.schemas.shard_format import LEVELS, SAFETENSORS, ShardFormat
from dspark.schemas.shard_numbers import parse_shards
from dspark.schemas.stored_shard import is_committed, shard_files
from dspark.schemas.url import refuse_url

_BLOCK = 512  # the unit of st_blocks, whatever the file system's own


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        source: the cache that was read.
        root: the new cache.
        manifest: of the new cache; not complete if shards are missing.
        source_format: form of the shards that were read.
        converted: shards that this job wrote.
        missing: shards that other jobs have to convert, or are converting now.
        left_out: unfinished extensions of the source.
        bytes_before: of the source's shards on disk.
        bytes_after: of the new shards on disk.
        seconds: that it took.
    """

    source: Path
    root: Path
    manifest: Manifest
    source_format: ShardFormat
    converted: int
    missing: tuple[int, ...]
    left_out: int
    bytes_before: int
    bytes_after: int
    seconds: float


def run_convert(options: ConvertOptions) -> ConvertReport:
    """Write a cache once more with its shards in another form; what ``dspark convert`` does.

    A conversion that was stopped continues with its missing shards when called again. The arguments
    are the fields of ``convert.options.ConvertOptions``.

    Raises:
        InputError: an option is not usable, the new cache's directory holds something else, or a
            worker has died.
        IncompatibleCacheError: the cache is unfinished or damaged.
    """
    start = time.monotonic()
    options = checked(options)
    refuse_url("--cache", options.cache, write=False)
    refuse_url("--to", options.to, write=True)
    form = _form(options)
    workers = _workers(options.num_workers)
    source, root = Path(options.cache), Path(options.to)
    source_manifest = _finished(source)
    manifest = planned(source_manifest, form, options.fields)
    shards: Sequence[int] = range(manifest.num_shards)
    if options.only is not None:
        shards = parse_shards(options.only, manifest.num_shards)
    _check_apart(source, root)
    refuse_inside_cache("--to", root)
    conversion = Conversion(source, source_manifest, root, manifest)
    missing = _begin(root, manifest)
    _copy_target_files(source, root, manifest)
    chosen = sorted({*missing} & {*shards})
    with ConvertProgress(manifest, chosen, show=options.progress) as progress:
        convert_shards(conversion, chosen, workers, progress)
    missing = _missing(root, manifest)
    if missing:
        manifest = read_manifest(root)
    else:
        # They say of rows what no form and no choice of fields changes.
        _copy(source, columns_path(source), columns_path(root), manifest.columns)
        if read_manifest(root) != manifest:
            write_manifest(root, manifest)
    return ConvertReport(
        source=source,
        root=root,
        manifest=manifest,
        source_format=source_manifest.shard_format,
        converted=progress.converted,
        missing=tuple(missing),
        left_out=sum(not e.complete for e in source_manifest.extensions),
        bytes_before=_bytes_on_disk(source, source_manifest),
        bytes_after=_bytes_on_disk(root, manifest),
        seconds=time.monotonic() - start,
    )


convert = takes(ConvertOptions)(run_convert)


def _form(options: ConvertOptions) -> ShardFormat:
    if options.format == SAFETENSORS:
        for name, value in (("--codec", options.codec), ("--level", options.level)):
            if value is not None:
                raise InputError(f"{name} {value}: only --format zarr has it")
        return ShardFormat()
    form = ShardFormat.zarr(options.codec, options.level)
    try:
        form.check()
    except ValueError:
        levels = LEVELS[form.codec or ""]
        which = f"it has {levels[0]} to {levels[-1]}" if levels else "it has none"
        raise InputError(
            f"--level {form.level}: no level of --codec {form.codec}; {which}"
        ) from None
    return form


def _workers(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise InputError(f"--num-workers {asked}: must be at least 1")
    return len(os.sched_getaffinity(0)) if asked is None else asked


def _finished(source: Path) -> Manifest:
    manifest = read_manifest(source)
    if not manifest.complete:
        raise IncompatibleCacheError(f"--cache {source}: {unfinished(source, manifest)}")
    read_columns(source, manifest)  # what a conversion copies last of all
    return manifest


def _check_apart(source: Path, root: Path) -> None:
    one, other = source.resolve(), root.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise InputError(f"--to {root}: it must lie apart from --cache {source}; choose another")


def _begin(root: Path, manifest: Manifest) -> list[int]:
    """Make the new cache's directory ready, with a manifest that is incomplete at first.

    Returns:
        The shards that are missing.

    Raises:
        InputError: it holds something else.
    """
    if root.exists() and not root.is_dir():
        raise InputError(f"--to {root}: a file of that name exists; choose another directory")
    there: Manifest | None = None
    if manifest_path(root).exists():
        there = read_manifest(root)
        if begun(there) != begun(manifest):
            raise IncompatibleCacheError(
                f"--to {root}: it holds another cache ({_difference(there, manifest)}); choose "
                "another directory, or give the options that made it"
            )
        remove_leftovers(root)
    else:
        if root.is_dir():
            names = {path.name for path in root.iterdir() if not is_tmp(path)} - {"lost+found"}
            if other := sorted(name for name in names if not name.startswith(".")):
                raise InputError(
                    f"--to {root}: the directory holds something else ({other[0]}); choose an "
                    "empty or new one"
                )
        make_dir(root)
    missing = _missing(root, manifest)
    if missing and there != begun(manifest):
        write_manifest(root, begun(manifest))
    for folder in (shards_dir(root), index_dir(root), target_dir(root)):
        make_dir(folder)
    return missing


def _difference(there: Manifest, manifest: Manifest) -> str:
    if there.shard_format != manifest.shard_format:
        return f"its shards are {there.shard_format} there, {manifest.shard_format} now"
    if different := identity_differences(there.identity, manifest.identity):
        return "; ".join(different)
    return "with other added fields, or of another target folder"


def _copy_target_files(source: Path, root: Path, manifest: Manifest) -> None:
    for name, expected in manifest.target_files.items():
        _copy(source, target_dir(source) / name, target_dir(root) / name, expected)


def _copy(source: Path, original: Path, copy: Path, expected: FileDigest | None) -> None:
    """Copy a file of the source, unless that was done.

    Raises:
        IncompatibleCacheError: it is missing or damaged.
        UnreadableError: it cannot be read.
    """
    try:
        if copy.is_file() and file_digest(copy) == expected:
            return
        if file_digest(original) != expected:
            raise IncompatibleCacheError(
                f"{original}: damaged: its bytes do not have the digest of the manifest; run "
                f"'{repair_command(source)}', which says what mends it"
            )
    except OSError as error:
        if is_unreadable(error):
            raise UnreadableError(Path(error.filename or original), error) from None
        raise IncompatibleCacheError(
            f"{original}: {error.strerror}; run '{repair_command(source)}', which says what "
            "mends it"
        ) from None
    make_dir(copy.parent)
    with open(original, "rb") as file, replacing(copy) as new:
        while piece := file.read(1 << 20):
            write_all(new, piece)


def _missing(root: Path, manifest: Manifest) -> list[int]:
    found = list(parts(root, manifest))
    return [
        shard
        for shard in range(manifest.num_shards)
        if not all(is_committed(part, paths, shard) for paths, part in found)
    ]


def _bytes_on_disk(root: Path, manifest: Manifest) -> int:
    files = [
        path
        for paths, part in parts(root, manifest)
        for shard in range(manifest.num_shards)
        for path in shard_files(paths, part, shard)
    ]
    return sum(path.stat().st_blocks * _BLOCK for path in files if path.is_file())
