"""Every stored byte read, by several threads, in bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dspark.schemas.digest import file_digest
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.manifest import Manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import target_dir
from dspark.schemas.stored_rows import StoredRow, stored_rows
from dspark.verify.faults import Fault, reading_fault, unreadable
from dspark.verify.rows import ShardRows

THREADS = 4
_AHEAD = 2 * THREADS
_TASK = 32 << 20
"""Bytes of a task, so that the threads share even a single shard."""


@dataclass(frozen=True)
class _Task:
    bytes: int
    check: Callable[[], list[Fault]]


def check_contents(
    root: Path,
    manifest: Manifest,
    shards: Sequence[Sequence[int]],
    target_files: Iterable[str],
    report: Callable[[int], None],
) -> list[Fault]:
    """Read all real rows and all target files, and compare them with what was written.

    Args:
        root: the cache.
        manifest: of the cache.
        shards: of each part, the committed ones that are as long as they must be.
        target_files: names under ``target/`` of files that are as long as they must be.
        report: called with the bytes that were read.
    """
    faults: list[Fault] = []
    tasks = _tasks(root, manifest, shards, target_files)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="dspark-verify") as pool:
        running: deque[tuple[int, Future[list[Fault]]]] = deque()
        try:
            while True:
                while len(running) < _AHEAD and (task := next(tasks, None)) is not None:
                    running.append((task.bytes, pool.submit(task.check)))
                if not running:
                    return faults
                size, future = running.popleft()
                faults += future.result()
                report(size)
        finally:
            pool.shutdown(cancel_futures=True)


def _tasks(
    root: Path, manifest: Manifest, shards: Sequence[Sequence[int]], target_files: Iterable[str]
) -> Iterator[_Task]:
    """In the order of the files and of the bytes in them; each made shortly before it runs."""
    for name in target_files:
        yield _Task(manifest.target_files[name].bytes, partial(_file, root, manifest, name))
    for (paths, part), numbers in zip(parts(root, manifest), shards, strict=True):
        for shard in numbers:
            try:
                rows = stored_rows(paths, part, shard)
            except UnreadableError as error:
                file = str(paths.index(shard).relative_to(root))
                yield _Task(0, partial(list, [unreadable(error, file, shard, paths.part)]))
                continue
            except IncompatibleCacheError:  # it was sound a moment ago: a repair took it away
                continue
            yield from _shard_tasks(ShardRows(shard, paths, part), rows)


def _shard_tasks(shard_rows: ShardRows, rows: Sequence[StoredRow]) -> Iterator[_Task]:
    for place, field in shard_rows.wide_fields:
        for size, some in _portions(rows, field.token_bytes):
            check = partial(shard_rows.wide, place, field, some)
            yield _Task(size, partial(shard_rows.checked, check))
    if not shard_rows.token_fields:
        return
    token_bytes = sum(field.token_bytes for _, field in shard_rows.token_fields)
    for size, some in _portions(rows, token_bytes):
        yield _Task(size, partial(shard_rows.checked, partial(shard_rows.tokens, some)))


def _portions(rows: Sequence[StoredRow], token_bytes: int) -> Iterator[tuple[int, list[StoredRow]]]:
    """Runs of rows of about ``_TASK`` bytes together: their bytes, and they."""
    portion: list[StoredRow] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += row.length * token_bytes
        if size >= _TASK:
            yield size, portion
            portion, size = [], 0
    if portion:
        yield size, portion


def _file(root: Path, manifest: Manifest, name: str) -> list[Fault]:
    path = target_dir(root) / name
    file = str(path.relative_to(root))
    try:
        if file_digest(path) == manifest.target_files[name]:
            return []
    except OSError as error:
        return [reading_fault(error, file)]
    return [Fault(file, "its bytes are not those that were written")]
