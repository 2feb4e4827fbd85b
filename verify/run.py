"""A verification from end to end."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from dspark.schemas.errors import IncompatibleCacheError, OtherVersionError, UnreadableError
from dspark.schemas.index import index_identity
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.options import check_given
from dspark.schemas.paths import first_indexes, manifest_path
from dspark.schemas.url import is_url
from dspark.verify.deep import check_contents
from dspark.verify.faults import Fault, Unreadable, by_place, problem_of
from dspark.verify.progress import VerifyProgress
from dspark.verify.remote import RemoteCopy
from dspark.verify.result import Verification
from dspark.verify.shallow import check_shallow
from dspark.verify.strays import strays


def verify_cache(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    progress: bool = False,
    local_cache: str | os.PathLike[str] | None = None,
) -> Verification:
    """Check a cache, finished or not; what ``dspark verify`` does.

    Of an unfinished cache the committed shards are checked.

    Args:
        path: the cache: its directory or URL.
        deep: also read every row and every target file.
        progress: show a progress bar on stderr.
        local_cache: of a cache at a URL, a folder with room for a shard; by default the system's
            for temporary files.

    Raises:
        IncompatibleCacheError: ``path`` is no cache, or one of another version, or cannot be
            reached.
        UnreadableError: its manifest or a folder cannot be read.
    """
    check_given(cache=path, local_cache=local_cache)
    if is_url(path):
        with RemoteCopy(os.fspath(path), local_cache, deep) as copy:
            return _verify(copy.root, deep, progress, copy)
    root = Path(path)
    try:
        return _verify(root, deep, progress)
    except OSError as error:
        if error.filename is None:
            raise
        raise UnreadableError(Path(error.filename), error) from None


def _verify(
    root: Path, deep: bool, progress: bool, remote: RemoteCopy | None = None
) -> Verification:
    start = time.monotonic()
    url = None if remote is None else remote.url
    manifest = read_or_blame_manifest(root, alone=remote is not None)
    if isinstance(manifest, Fault):
        return Verification(
            root, None, deep, 0, 0, 0, time.monotonic() - start, (manifest,), (), (), url
        )
    shallow = check_shallow(root, manifest)
    faults = shallow.faults
    target_bytes = sum(manifest.target_files[name].bytes for name in shallow.target_files)
    with VerifyProgress(shallow.row_bytes + target_bytes, show=progress and deep) as bar:
        if deep:
            check = remote.check_contents if remote else partial(check_contents, root)
            faults += check(manifest, shallow.readable, shallow.target_files, bar)
    found = sorted(dict.fromkeys(faults), key=by_place)
    return Verification(
        root=root,
        manifest=manifest,
        deep=deep,
        shards=shallow.committed[0],
        rows=shallow.counts.ok,
        bytes_read=bar.bytes,
        seconds=time.monotonic() - start,
        faults=tuple(f for f in found if not isinstance(f, Unreadable)),
        unreadable=tuple(f for f in found if isinstance(f, Unreadable)),
        notes=(*_unfinished(manifest, shallow.committed), *strays(root, manifest)),
        url=url,
    )


def _unfinished(manifest: Manifest, committed: Sequence[int]) -> Iterator[str]:
    """One line for each extension that is not finished, which leaves the cache as sound as it is.

    Args:
        manifest: of the cache.
        committed: of each part, the shards that have it.
    """
    for number, extension in enumerate(manifest.extensions, 1):
        if not extension.complete:
            names = ", ".join(field.name for field in extension.fields)
            yield (
                f"plus{number} ({names}): not finished, {committed[number]:,} of "
                f"{manifest.num_shards:,} shards are committed; nothing reads it yet"
            )


def read_or_blame_manifest(root: Path, *, alone: bool = False) -> Manifest | Fault:
    """The manifest, or what is wrong with it.

    Args:
        root: the cache.
        alone: whether a damaged manifest is one although no index is beside it.

    Raises:
        IncompatibleCacheError: there is none, it cannot be read, or it is another version's or
            another program's.
    """
    path = manifest_path(root)
    try:
        manifest = read_manifest(root)
    except (OtherVersionError, UnreadableError):
        raise
    except IncompatibleCacheError as error:
        if not (path.exists() and (alone or first_indexes(root))):
            raise
        return Fault(path.name, problem_of(error, path))
    if _is_of_another_capture(root, manifest):
        return Fault(
            path.name,
            "it belongs to a capture with other settings than all indexes here, which agree with "
            "each other",
        )
    return manifest


def _is_of_another_capture(root: Path, manifest: Manifest) -> bool:
    identities = set()
    for path in first_indexes(root):
        with suppress(OSError):
            identity = index_identity(path)
            if identity == manifest.identity_hash:
                return False
            identities.add(identity)
    return len(identities - {None}) == 1
