"""What the first worker does before the first shard: look at what is there, make it ready."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dspark.capture.conversations import Conversations
from dspark.capture.disk_room import check_room
from dspark.capture.finish import missing_shards, other_captures
from dspark.capture.overwrite import delete_cache
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.settings import CaptureSettings
from dspark.capture.targets.target import Target
from dspark.capture.targets.target_files import write_target_files
from dspark.capture.workers.job import restarts
from dspark.schemas.digest import same_sizes
from dspark.schemas.durable import is_tmp, make_dir
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.leftovers import remove_leftovers
from dspark.schemas.manifest import (
    Manifest,
    identity_differences,
    read_manifest,
    write_manifest,
)
from dspark.schemas.nested import is_cache, refuse_inside_cache
from dspark.schemas.paths import CachePaths, index_dir, manifest_path, shards_dir, target_dir

_OURS = {"manifest.json", "shards", "index", "target"}
_HARMLESS = {"lost+found"}
"""What file systems put into directories, beside hidden files."""


def check_out(root: Path) -> None:
    """Refuse an ``--out`` that cannot be written or holds something that is not ours.

    Raises:
        InputError: with the reason.
    """
    if root.exists() and not root.is_dir():
        raise InputError(f"--out {root}: a file of that name exists; choose another directory")
    above = next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))
    if not above.exists():
        raise InputError(
            f"--out {root}: {above} is a link that leads nowhere; make what it points to, or "
            "choose another directory"
        )
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"--out {root}: cannot be written, because {above} cannot")
    refuse_inside_cache("--out", root)
    other = {p.name for p in root.iterdir() if not is_tmp(p)} if root.is_dir() else set()
    if other := {name for name in other - _OURS - _HARMLESS if not name.startswith(".")}:
        way_out = "choose an empty or new one"
        if is_cache(root):
            way_out = "move it away: it is no part of the cache"
        raise InputError(
            f"--out {root}: the directory holds something else ({sorted(other)[0]}); {way_out}"
        )


def prepare(
    settings: CaptureSettings, plan: CapturePlan, target: Target, conversations: Conversations
) -> tuple[Manifest, list[int], tuple[str, ...]]:
    """Check what is in ``--out``, and write what the shards need beside them.

    Returns:
        The manifest that is there now, complete if nothing is left to do; the shards that are
        committed; and the folder of the target's files, if they were written.

    Raises:
        IncompatibleCacheError: a capture with other settings is there.
        InputError: the disk has clearly no room.
    """
    root = settings.out
    if settings.overwrite and restarts() == 0:
        delete_cache(root)
    existing = existing_manifest(root, plan)
    paths = CachePaths(root, plan.manifest.num_shards)
    missing = missing_shards(plan.manifest, paths)
    there = sorted({*range(plan.manifest.num_shards)} - {*missing})
    has_target = existing is not None and same_sizes(target_dir(root), existing.target_files)
    remove_leftovers(root)
    if existing is not None and existing.complete and has_target and not missing:
        return existing, there, ()
    chosen = missing if settings.only is None else sorted({*missing} & {*settings.only})
    _check_room(settings, plan, target, conversations, chosen)
    for folder in (shards_dir(root), index_dir(root), target_dir(root)):
        make_dir(folder)
    rewritten: tuple[str, ...] = ()
    if existing is not None and has_target:
        files = existing.target_files
    else:
        files, rewritten = write_target_files(root, target), ("target/",)
    extensions = () if existing is None else existing.extensions
    manifest = replace(plan.manifest, target_files=files, extensions=extensions)
    if manifest != existing:
        write_manifest(root, manifest)
    return manifest, there, rewritten


def existing_manifest(root: Path, plan: CapturePlan) -> Manifest | None:
    """The manifest of the capture that is in ``--out``, if there is one.

    Raises:
        IncompatibleCacheError: it has other settings, or is damaged; or the manifest is missing
            beside shards with other settings.
    """
    if not manifest_path(root).exists():
        if others := other_captures(plan.manifest, root):
            raise IncompatibleCacheError(
                f"--out {root}: it holds no manifest, but shards of a capture with other settings "
                f"({others[0].name} …); give the command that made them, choose another --out, or "
                "give --overwrite to delete them and start anew"
            )
        return None
    existing = read_manifest(root)
    if different := identity_differences(existing.identity, plan.manifest.identity):
        fields_alone = all(phrase.startswith(("layers: ", "logits: ")) for phrase in different)
        add = ", --extend to add fields to it" if fields_alone and existing.complete else ""
        raise IncompatibleCacheError(
            f"--out {root}: it holds a capture with other settings ({'; '.join(different)}); use "
            f"those settings to continue it{add}, choose another --out, or give --overwrite to "
            "delete it and start anew"
        )
    if existing.shard_format != plan.manifest.shard_format:
        form = existing.shard_format.name
        raise IncompatibleCacheError(
            f"--out {root}: its shards are in {form} form, and a cache has one form; give --format "
            f"{form} to continue it, and convert it then with 'dspark convert'; or choose another "
            "--out"
        )
    return existing


def _check_room(
    settings: CaptureSettings,
    plan: CapturePlan,
    target: Target,
    conversations: Conversations,
    missing: Sequence[int],
) -> None:
    options = replace(settings.rows, on_bad_row="skip")

    def length(sample: int) -> int:
        row = encode_row(sample, conversations, target, plan.manifest.max_length, options)
        return len(row) if isinstance(row, EncodedRow) else 0

    check_room(plan.manifest, missing, lambda rows: list(map(length, rows)), settings.out)
