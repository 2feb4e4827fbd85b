"""A cache at a URL, and the folder here that holds its small files and some of its shards."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path

import pyarrow as pa
import xxhash

from dspark.remote.local_cache import LocalCache, Reservation, Wanted, is_being_fetched
from dspark.remote.shards import RemoteField
from dspark.remote.size import parse_size
from dspark.remote.store import (
    DamagedObjectError,
    MissingObjectError,
    Store,
    mend,
)
from dspark.schemas.columns import Columns, read_columns
from dspark.schemas.digest import FileDigest, file_digest
from dspark.schemas.durable import make_dir, names, replacing, write_all, write_at, write_file
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.index import read_index
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.parts import readable_parts
from dspark.schemas.paths import columns_path, index_dir, manifest_path, target_dir
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes, StoredRow, rows_in
from dspark.schemas.url import checked_url, folder_name

_MOST_MANIFEST = 4 << 20
_THREADS = 16
_POLL = 0.05
_OPEN_OBJECTS = 256
_OPEN_INDEXES = 16


class Mirror:
    """A cache at a URL. What is read of all rows is here once it is opened; the index of a shard is
    fetched when that is first needed.

    Args:
        url: of the folder with ``manifest.json``.
        local_cache: folder for mirrors; by default one of the user's cache directory.
        size: of all shards in it together, such as ``200GB``; by default what is free.
        target_files: fetch those of ``target/``, too.

    Attributes:
        url: see above.
        root: the mirror: a folder with the cache's manifest and columns, and with what was fetched.
        manifest: of the cache.
        columns: of the cache.
        local_cache: where its shards go.
        arguments: the first three, to open it once more.

    Raises:
        IncompatibleCacheError: there is no cache, its small files are damaged, or it cannot be
            reached.
        InputError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        local_cache: str | os.PathLike[str] | None = None,
        size: str | int | None = None,
        *,
        target_files: bool = True,
    ) -> None:
        self.arguments = url, local_cache, size
        self.url = checked_url(url)
        limit = None if size is None else parse_size("--local-cache-size", size)
        self.store = Store(self.url)
        folder = default_folder() if local_cache is None else Path(local_cache)
        name = manifest_path(Path()).name
        try:
            data = self.store.read(name, _MOST_MANIFEST)
        except MissingObjectError:
            raise IncompatibleCacheError(
                f"{self.url} is not a cache: it has no {name}; give the URL of the folder that has"
            ) from None
        # A cache that was changed has another manifest, and so another mirror.
        digest = xxhash.xxh3_64_hexdigest(self.url.encode() + b"\0" + data)
        self.root = folder.absolute() / f"{folder_name(self.url)}-{digest}"
        with _local_errors(folder):
            self.local_cache = LocalCache(folder.absolute(), limit)
            make_dir(self.root)
            write_file(manifest_path(self.root), data)
            with self.told():
                self.manifest: Manifest = read_manifest(self.root)
            if not self.manifest.complete:
                raise IncompatibleCacheError(
                    f"{self.url}: the capture is not finished; finish it where it was begun, and "
                    "copy the cache once more"
                )
            self._parts = list(readable_parts(self.root, self.manifest))
            self._place = {
                field.name: (number, field)
                for number, (_, part) in enumerate(self._parts)
                for field in part.fields
            }
            make_dir(index_dir(self.root))
            self.columns: Columns = self._fetch_columns()
            if target_files:
                self._fetch_target_files()
        self._field = lru_cache(maxsize=_OPEN_OBJECTS)(self._open_field)
        self._rows = lru_cache(maxsize=_OPEN_INDEXES)(self._read_rows)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let errors about files of the mirror speak of those at the URL."""
        try:
            yield
        except IncompatibleCacheError as error:
            raise IncompatibleCacheError(str(error).replace(str(self.root), self.url)) from None

    # ── small files ──

    def _fetch_columns(self) -> Columns:
        with suppress(IncompatibleCacheError):
            return read_columns(self.root, self.manifest)
        self._download(columns_path(self.root), self.manifest.columns)
        with self.told():
            return read_columns(self.root, self.manifest)

    def _fetch_target_files(self) -> None:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="dspark-open") as pool:
            try:
                for task in [
                    pool.submit(self._fetch_target_file, name)
                    for name in self.manifest.target_files
                ]:
                    task.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _fetch_target_file(self, name: str) -> None:
        path = target_dir(self.root) / name
        file = self.manifest.target_files[name]
        with suppress(OSError):
            if file_digest(path) == file:
                return
        make_dir(path.parent)
        self._download(path, file)

    def _download(self, path: Path, expected: FileDigest | None = None) -> None:
        name = path.relative_to(self.root).as_posix()
        size = self.store.size(name)
        sound = expected is None or size == expected.bytes
        with replacing(path) as out:
            state = xxhash.xxh3_64()
            for piece in self.store.pieces(name, size) if sound else ():
                state.update(piece)
                write_all(out, piece)
            if expected and expected != FileDigest(size, state.hexdigest()):
                raise DamagedObjectError(
                    f"{self.store.where(name)}: damaged: its bytes do not have the size and "
                    f"digest of the manifest; {mend(self.url)}"
                )

    # ── shards ──

    def rows(self, field: str, shard: int) -> Mapping[int, RowBytes]:
        """The rows of a shard that hold a sample, by row, as the index of a field has them."""
        return self._rows(self._place[field][0], shard)

    def _read_rows(self, number: int, shard: int) -> dict[int, StoredRow]:
        return {row.row: row for row in rows_in(self._index(number, shard))}

    def index(self, field: str, shard: int) -> pa.Table:
        """The index of a shard that lists a field, fetched if no sound one is here.

        Raises:
            IncompatibleCacheError: that at the URL is missing or damaged, or says otherwise than
                the columns.
        """
        return self._index(self._place[field][0], shard)

    def _index(self, number: int, shard: int) -> pa.Table:
        paths, part = self._parts[number]
        path = paths.index(shard)
        try:
            table, _ = read_index(paths, part, shard)
        except IncompatibleCacheError:
            self._download(path)
            with self.told():
                table, _ = read_index(paths, part, shard)
        if not self.columns.are_those_of(table, part.rows_of(shard)):
            path.unlink(missing_ok=True)
            where = self.store.where(path.relative_to(self.root).as_posix())
            raise DamagedObjectError(
                f"{where}: it lists other rows than {columns_path(self.root).name}; "
                + mend(self.url)
            )
        return table

    def field(self, name: str, shard: int) -> RemoteField:
        """A field of a shard at the URL; errors are those of ``RemoteField``."""
        return self._field(name, shard)

    def _open_field(self, name: str, shard: int) -> RemoteField:
        number, field = self._place[name]
        paths, part = self._parts[number]
        return RemoteField(self.store, paths, part, shard, field)

    def unit(self, field: str, shard: int) -> Path:
        """The file here of a field of a shard, once it was fetched."""
        paths, _ = self._parts[self._place[field][0]]
        return paths.shard(shard).with_suffix("") / f"{field}.safetensors"

    def layout(self, field: str) -> ShardLayout:
        """Of the files of a field."""
        return ShardLayout([self._place[field][1]], self.manifest.rows_per_shard)

    def open_unit(self, field: str, shard: int) -> FileIO | None:
        """Open a unit, and note that it is used; None if it is not there."""
        with suppress(FileNotFoundError):
            file = FileIO(self.unit(field, shard))
            with suppress(PermissionError):  # it is another user's
                os.utime(file.fileno())
            return file
        return None

    def wanted(self, field: str, shard: int) -> Wanted:
        """A unit, as it will be."""
        layout = self.layout(field)
        extents = [(0, len(layout.header))]
        for row in self.rows(field, shard).values():
            extents += layout.row_extents(self._place[field][1], row.row, row.length)
        return Wanted(self.unit(field, shard), layout.file_size, extents)

    def reserve(
        self, fields: Iterable[str], shard: int, keep: Callable[[Path], bool]
    ) -> "list[Fetch] | None":
        """Take the room for fields of a shard; see ``LocalCache.reserve``.

        Returns:
            What fetches each unit that is neither there nor being fetched by another process.
        """
        missing = {self.unit(f, shard): f for f in fields if not self.unit(f, shard).exists()}
        reserved = self.local_cache.reserve([self.wanted(f, shard) for f in missing.values()], keep)
        if reserved is None:
            return None
        return [Fetch(self, missing[r.unit.path], shard, r) for r in reserved]

    def wait_for(self, path: Path) -> None:
        """Wait until a unit is there, or nobody is fetching it."""
        while not path.exists() and is_being_fetched(path):
            time.sleep(_POLL)


class Fetch:
    """One unit that is to be fetched, with the room that it takes.

    Attributes:
        name: of the field.
    """

    def __init__(self, mirror: Mirror, name: str, shard: int, reservation: Reservation) -> None:
        self._mirror, self._shard, self._reservation = mirror, shard, reservation
        self.name = name

    def __call__(self) -> None:
        """Fetch it, compare every row with its digest, and only then give it its name.

        Raises:
            DamagedObjectError: a row is not what was captured.
            UnreachableError: it cannot be read.
            OSError: it cannot be written.
        """
        try:
            layout, file = self._mirror.layout(self.name), self._reservation.file
            rows = list(self._mirror.rows(self.name, self._shard).values())
            remote = self._mirror.field(self.name, self._shard)
            with names(self._reservation.unit.path):
                write_at(file, memoryview(layout.header), 0)
                for row, runs in remote.rows(rows):
                    extents = layout.row_extents(remote.field, row.row, row.length)
                    for run, (offset, _) in zip(runs, extents, strict=True):
                        write_at(file, run, offset)
            self._reservation.publish()
        finally:
            self._reservation.close()

    def cancel(self) -> None:
        """Give up the room."""
        self._reservation.close()


def default_folder() -> Path:
    """Where mirrors lie unless it is said."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark"


@contextmanager
def _local_errors(folder: Path) -> Iterator[None]:
    """Say of a local cache that cannot be written what it is."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--local-cache {folder}: {error.filename or folder}: {error.strerror}; give a folder "
            "on a disk with room"
        ) from None
