"""What can be told without reading the rows: sizes, headers, indexes, counts."""

import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dspark.schemas.columns import Columns, read_columns
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths, columns_path, manifest_path, target_dir
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify.faults import Fault, problem_of, reading_fault, unreadable
from dspark.verify.groups import check_group

_THREADS = 4


@dataclass(frozen=True)
class Shallow:
    """What the shallow check found.

    Attributes:
        faults: in any order.
        committed: of each part (see ``schemas.parts``), the number of shards with an index.
        counts: of the shards whose first file and its index are readable.
        row_bytes: of the rows in all readable files, over all parts.
        readable: of each part, the shards whose index is sound and whose file is as long as it
            must be.
        target_files: names under ``target/`` of the files that are as long as they must be.
    """

    faults: list[Fault]
    committed: list[int]
    counts: Counts
    row_bytes: int
    readable: list[list[int]]
    target_files: list[str]


@dataclass(frozen=True)
class _Shard:
    """The same of one part of a shard."""

    faults: list[Fault]
    committed: bool
    counts: Counts | None = None
    head_error: float | None = None
    readable: bool = False


@dataclass(frozen=True)
class _Part:
    paths: CachePaths
    manifest: Manifest


def check_shallow(root: Path, manifest: Manifest) -> Shallow:
    """Check all files of a cache without reading the rows."""
    places = [_Part(paths, part) for paths, part in parts(root, manifest)]
    columns, faults = _columns(root, manifest)
    with ThreadPoolExecutor(_THREADS) as pool:
        check = partial(_check_shard, places, columns)
        shards = list(pool.map(check, range(manifest.num_shards)))
    faults += [fault for files in shards for file in files for fault in file.faults]
    first = [files[0] for files in shards]
    counts = _sum([file.counts for file in first if file.counts is not None])
    if manifest.complete and all(file.counts is not None for file in first):
        errors = [file.head_error for file in first if file.head_error is not None]
        faults += _check_totals(root, manifest, counts, max(errors, default=None))
    by_part = list(zip(*shards, strict=True))
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
        committed=[sum(file.committed for file in files) for files in by_part],
        counts=_sum(_readable(first)),
        row_bytes=sum(
            _sum(_readable(files)).tokens
            * sum(field.token_bytes for field in place.manifest.fields)
            for place, files in zip(places, by_part, strict=True)
        ),
        readable=[[i for i, file in enumerate(files) if file.readable] for files in by_part],
        target_files=target_files,
    )


def _columns(root: Path, manifest: Manifest) -> tuple[Columns | None, list[Fault]]:
    """The columns of a complete cache, or what is wrong with them."""
    if not manifest.complete:
        return None, []
    path = columns_path(root)
    name = str(path.relative_to(root))
    try:
        return read_columns(root, manifest), []
    except UnreadableError as error:
        return None, [unreadable(error, name)]
    except IncompatibleCacheError as error:
        return None, [Fault(name, problem_of(error, path))]


def _check_shard(places: Sequence[_Part], columns: Columns | None, shard: int) -> list[_Shard]:
    """All parts of a shard, and what the columns say of it."""
    found: list[_Shard] = []
    first = None
    for place in places:
        file, index = _check_file(place, shard, first)
        found.append(file)
        if place.paths.part == 0:
            first = index
    paths, rows = places[0].paths, places[0].manifest.rows_of(shard)
    if columns is not None and first is not None and not columns.are_those_of(first, rows):
        name = str(columns_path(paths.root).relative_to(paths.root))
        other = f"it says otherwise than {paths.index(shard).name}, which is sound"
        found[0].faults.append(Fault(name, other))
    return found


def _check_file(place: _Part, shard: int, first: pa.Table | None) -> tuple[_Shard, pa.Table | None]:
    """One part of a shard, and its index if that is sound.

    Args:
        place: the part.
        shard: its number.
        first: the sound index of the first part, which that of an extension must agree with.
    """
    paths, manifest = place.paths, place.manifest
    part = paths.part
    index = paths.index(shard)
    name = str(index.relative_to(paths.root))
    try:
        committed = is_there(index)
    except OSError as error:
        return _Shard([reading_fault(error, name, shard, part)], committed=False), None
    if not committed:
        if not manifest.complete:
            return _Shard([], committed=False), None
        missing = Fault(name, "missing, so its shard does not count", shard, part=part)
        return _Shard([missing], committed=False), None
    faults: list[Fault] = []
    table = counts = head_error = None
    try:
        table, facts = read_index(paths, manifest, shard)
    except UnreadableError as error:
        faults.append(unreadable(error, name, shard, part))
    except IncompatibleCacheError as error:
        faults.append(Fault(name, problem_of(error, index), shard, part=part))
    else:
        counts, head_error = _count(table), facts["head_error"]
        if part and first is not None and _rows(table) != _rows(first):
            other = "its rows are not those of the shard's first index"
            faults.append(Fault(name, other, shard, part=part))
    if manifest.shard_format.is_zarr:
        found = check_group(paths, manifest, shard, table)
        readable = not found
    else:
        found, readable = _check_safetensors(paths, manifest, shard)
    faults += found
    return _Shard(faults, True, counts, head_error, readable and counts is not None), table


def _check_safetensors(
    paths: CachePaths, manifest: Manifest, shard: int
) -> tuple[list[Fault], bool]:
    """Size and header of a safetensors file: the faults, and whether its rows can be read."""
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    path = paths.shard(shard)
    name = str(path.relative_to(paths.root))
    try:
        problem = _size_problem(path, layout.file_size)
        readable = problem is None
        if readable and not _has_header(path, layout.header):
            problem = "its header is not the one that the manifest describes"
    except OSError as error:
        return [reading_fault(error, name, shard, paths.part)], False
    return [Fault(name, problem, shard, part=paths.part)] if problem else [], readable


def _readable(files: Iterable[_Shard]) -> list[Counts]:
    return [file.counts for file in files if file.readable and file.counts is not None]


def _rows(table: pa.Table) -> pa.Table:
    """What the indexes of all parts say alike."""
    return table.drop_columns(["digests"])


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


def _sum(some: Sequence[Counts]) -> Counts:
    skipped: Counter[str] = Counter()
    for counts in some:
        skipped.update(counts.skipped)
    return Counts(
        ok=sum(c.ok for c in some),
        skipped=dict(skipped),
        tokens=sum(c.tokens for c in some),
        image_tokens=sum(c.image_tokens for c in some),
        loss_tokens=sum(c.loss_tokens for c in some),
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
