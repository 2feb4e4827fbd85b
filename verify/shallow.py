"""What can be told without reading the rows: sizes, headers, indexes, counts."""

import stat
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.paths import CachePaths, manifest_path, target_dir
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify.faults import Fault, problem_of, reading_fault, unreadable

_THREADS = 4


@dataclass(frozen=True)
class Shallow:
    """What the shallow check found.

    Attributes:
        faults: in any order.
        committed: shards with an index.
        counts: of the readable shards.
        readable: shards whose index is sound and whose file is as long as it must be.
        target_files: names under ``target/`` of the files that are as long as they must be.
    """

    faults: list[Fault]
    committed: int
    counts: Counts
    readable: list[int]
    target_files: list[str]


@dataclass(frozen=True)
class _Shard:
    """The same of one shard; ``counts`` is None without a sound index."""

    faults: list[Fault]
    committed: bool
    counts: Counts | None = None
    head_error: float | None = None
    readable: bool = False


def check_shallow(root: Path, manifest: Manifest) -> Shallow:
    """Check all files of a cache without reading the rows."""
    paths = CachePaths(root, manifest.num_shards)
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    with ThreadPoolExecutor(_THREADS) as pool:
        shards = list(
            pool.map(lambda i: _check_shard(paths, manifest, layout, i), range(manifest.num_shards))
        )
    faults = [fault for shard in shards for fault in shard.faults]
    counted = [shard for shard in shards if shard.counts is not None]
    counts = _sum([shard.counts for shard in counted if shard.counts is not None])
    if manifest.complete and len(counted) == manifest.num_shards:
        errors = [shard.head_error for shard in counted if shard.head_error is not None]
        faults += _check_totals(root, manifest, counts, max(errors, default=None))
    target_files = []
    for name, expected in manifest.target_files.items():
        path = target_dir(root) / name
        try:
            if not manifest.complete and not is_there(path):
                continue  # a repair took it away, and the capture writes it again
            problem = _size_problem(path, expected.bytes)
        except OSError as error:
            faults.append(reading_fault(error, str(path.relative_to(root))))
            continue
        if problem:
            faults.append(Fault(str(path.relative_to(root)), problem))
        else:
            target_files.append(name)
    return Shallow(
        faults=faults,
        committed=sum(shard.committed for shard in shards),
        counts=_sum([s.counts for s in counted if s.readable and s.counts is not None]),
        readable=[i for i, shard in enumerate(shards) if shard.readable],
        target_files=target_files,
    )


def _check_shard(paths: CachePaths, manifest: Manifest, layout: ShardLayout, shard: int) -> _Shard:
    index = paths.index(shard)
    name = str(index.relative_to(paths.root))
    try:
        committed = is_there(index)
    except OSError as error:
        return _Shard([reading_fault(error, name, shard)], committed=False)
    if not committed:
        if not manifest.complete:
            return _Shard([], committed=False)
        return _Shard([Fault(name, "missing, so its shard does not count", shard)], committed=False)
    faults: list[Fault] = []
    counts = head_error = None
    try:
        table, facts = read_index(paths, manifest, shard)
    except UnreadableError as error:
        faults.append(unreadable(error, name, shard))
    except IncompatibleCacheError as error:
        faults.append(Fault(name, problem_of(error, index), shard))
    else:
        counts, head_error = _count(table), facts["head_error"]
    data = paths.shard(shard)
    name = str(data.relative_to(paths.root))
    problem = None
    readable = False
    try:
        problem = _size_problem(data, layout.file_size)
        readable = problem is None
        if readable and not _has_header(data, layout.header):
            problem = "its header is not the one that the manifest describes"
    except OSError as error:
        readable = False
        faults.append(reading_fault(error, name, shard))
    if problem:
        faults.append(Fault(name, problem, shard))
    return _Shard(faults, True, counts, head_error, readable and counts is not None)


def is_there(path: Path) -> bool:
    """Whether something is at ``path``.

    Raises:
        OSError: it cannot be told.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _size_problem(path: Path, size: int) -> str | None:
    try:
        found = path.stat()
    except FileNotFoundError as error:
        return f"cannot be found ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "not a file"
    if found.st_size != size:
        return f"{found.st_size:,} bytes long, {size:,} expected"
    return None


def _has_header(path: Path, header: bytes) -> bool:
    with open(path, "rb", buffering=0) as file:
        return file.read(len(header)) == header


def _count(table: pa.Table) -> Counts:
    ok = pc.equal(table["status"], OK)
    skipped = Counter(
        reason.split(":", 1)[0] for reason in table.filter(pc.invert(ok))["reason"].to_pylist()
    )
    return Counts(
        ok=pc.sum(ok).as_py() or 0,
        skipped=dict(skipped),
        tokens=pc.sum(table["length"]).as_py() or 0,
        image_tokens=pc.sum(table["image_tokens"]).as_py() or 0,
        loss_tokens=pc.sum(table["loss_tokens"]).as_py() or 0,
    )


def _sum(parts: Sequence[Counts]) -> Counts:
    skipped: Counter[str] = Counter()
    for part in parts:
        skipped.update(part.skipped)
    return Counts(
        ok=sum(c.ok for c in parts),
        skipped=dict(skipped),
        tokens=sum(c.tokens for c in parts),
        image_tokens=sum(c.image_tokens for c in parts),
        loss_tokens=sum(c.loss_tokens for c in parts),
    )


def _check_totals(
    root: Path, manifest: Manifest, counts: Counts, head_error: float | None
) -> list[Fault]:
    """The manifest's totals against those of all indexes."""
    name = manifest_path(root).name
    stated, found = asdict(manifest.counts), asdict(counts)
    faults = [
        Fault(name, f"counts.{key} is {stated[key]}, the indexes give {found[key]}")
        for key in stated
        if stated[key] != found[key]
    ]
    if manifest.head_error != head_error:
        faults.append(
            Fault(
                name, f"logits.head_error is {manifest.head_error}, the indexes give {head_error}"
            )
        )
    return faults
