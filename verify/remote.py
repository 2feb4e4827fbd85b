"""A cache at a URL, made up here so that it can be checked like one on disk."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from dspark.remote.shards import RemoteField
from dspark.remote.store import DamagedObjectError, MissingObjectError, Store
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths, columns_path, manifest_path, target_dir
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import stored_rows
from dspark.schemas.stored_shard import shard_files, zarr_layout
from dspark.schemas.url import checked_url
from dspark.verify.deep import check_contents
from dspark.verify.faults import Fault

_THREADS = 16
_MOST_MANIFEST = 4 << 20


class RemoteCopy:
    """A temporary folder that looks like a cache at a URL; a context manager that removes it.

    Indexes and columns are there. Of a shard's files only the sizes are right, and the bytes that
    say how they are laid out; the rest are holes. What is missing at the URL is missing.

    Args:
        url: of the cache.
        folder: where the temporary one is made; by default in the system's.
        deep: whether all of ``target/`` is wanted.

    Attributes:
        url: see above.
        root: the folder.

    Raises:
        IncompatibleCacheError: there is no cache, or it cannot be reached.
    """

    def __init__(self, url: str, folder: str | os.PathLike[str] | None, deep: bool) -> None:
        self.url = checked_url(url)
        self._store = Store(self.url)
        self._deep = deep
        try:
            if folder is not None:
                os.makedirs(folder, exist_ok=True)
            self._temporary = TemporaryDirectory(prefix="dspark-verify-", dir=folder)
        except OSError as error:
            raise InputError(
                f"--local-cache {folder}: {error.strerror}; give a folder on a disk with room"
            ) from None
        self.root = Path(self._temporary.name)
        self._manifest: Manifest | None = None

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._temporary.cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._store.abandon()
        self._temporary.cleanup()

    def _make(self) -> None:
        name = manifest_path(Path()).name
        try:
            data = self._store.read(name, _MOST_MANIFEST)
        except MissingObjectError:
            raise IncompatibleCacheError(
                f"{self.url} is not a cache: it has no {name}; give the URL of the folder that has"
            ) from None
        manifest_path(self.root).write_bytes(data)
        try:
            self._manifest = read_manifest(self.root)
        except IncompatibleCacheError:
            return  # the check of the manifest says so
        tasks: list[Callable[[], None]] = []
        for paths, part in parts(self.root, self._manifest):
            for path in (paths.index(0), *shard_files(paths, part, 0)):
                path.parent.mkdir(parents=True, exist_ok=True)
            for shard in range(part.num_shards):
                tasks.append(partial(self._whole, paths.index(shard)))
                tasks += [
                    partial(self._hollow, path, *_telling(paths, part, shard, path))
                    for path in shard_files(paths, part, shard)
                ]
        if self._manifest.complete:
            tasks.append(partial(self._whole, columns_path(self.root)))
        for name in self._manifest.target_files:
            path = target_dir(self.root) / name
            tasks.append(partial(self._whole if self._deep else self._hollow, path))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="dspark-verify") as pool:
            try:
                for task in [pool.submit(task) for task in tasks]:
                    task.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def check_contents(
        self,
        manifest: Manifest,
        shards: Sequence[Sequence[int]],
        target_files: Iterable[str],
        report: Callable[[int], None],
    ) -> list[Fault]:
        """See ``deep.check_contents``; shards are fetched one after another, and not kept."""
        none: list[list[int]] = [[] for _ in shards]
        faults = check_contents(self.root, manifest, none, target_files, report)
        for number, (paths, part) in enumerate(parts(self.root, manifest)):
            for shard in shards[number]:
                filled = self._fill(paths, part, shard)
                one = [*none]
                one[number] = [shard]
                faults += check_contents(self.root, manifest, one, (), report)
                for path in filled:
                    size = path.stat().st_size
                    os.truncate(path, 0)
                    os.truncate(path, size)
        return faults

    def _fill(self, paths: CachePaths, part: Manifest, shard: int) -> list[Path]:
        """Fetch the rows of a shard; the files that now have them."""
        files = shard_files(paths, part, shard)
        if part.shard_format.is_zarr:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self._whole, files))
            return files
        rows = stored_rows(paths, part, shard)
        layout = ShardLayout(part.fields, part.rows_per_shard)
        with open(files[0], "r+b", buffering=0) as file:

            def fetch(remote: RemoteField) -> None:
                for row, runs in remote.rows(rows, check=False):
                    extents = layout.row_extents(remote.field, row.row, row.length)
                    for run, (offset, _) in zip(runs, extents, strict=True):
                        os.pwrite(file.fileno(), run, offset)

            remotes = [RemoteField(self._store, paths, part, shard, f) for f in part.fields]
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(fetch, remotes))
        return files

    def _whole(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pieces = self._store.pieces(self._name(path))
            with open(path, "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except MissingObjectError:
            path.unlink(missing_ok=True)

    def _hollow(self, path: Path, start: int = 0, end: int = 0) -> None:
        """A file of the right size, with some of its bytes (negative ones from its end)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        name = self._name(path)
        try:
            size = self._store.size(name)
            start, end = (max(0, size + start), size) if start < 0 else (start, min(end, size))
            data = self._store.ranges(name, [start], [end])[0] if start < end else b""
        except (MissingObjectError, DamagedObjectError):
            return
        with open(path, "wb") as file:
            file.truncate(size)
            file.seek(start)
            file.write(data)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _telling(paths: CachePaths, part: Manifest, shard: int, path: Path) -> tuple[int, int]:
    """Which bytes of a shard's file say how it is laid out."""
    if not part.shard_format.is_zarr:
        return 0, len(ShardLayout(part.fields, part.rows_per_shard).header)
    layout = zarr_layout(part)
    name = path.relative_to(paths.group(shard)).as_posix()
    if name in layout.documents:
        return 0, len(layout.documents[name]) + 1
    array = next(a for a in layout.arrays.values() if a.object == name)
    return -array.index_bytes, 0
