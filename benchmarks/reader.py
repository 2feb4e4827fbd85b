"""How fast batches come from a cache, beside other forms of the same rows, and beside the disk.

    python -m benchmarks.reader --json build/benchmarks/reader.json

The rows are random bfloat16 features as wide as those of a 2 B target; what is read is what the
``dspark`` draft reads. Useful bytes are those of real tokens. Each form is read in the same order,
one after the other in each repetition. Warm: all files are in the page cache. Cold: the page cache
is told to drop each file (``POSIX_FADV_DONTNEED`` after ``fsync``) before each pass.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dspark.benchmarks import command
from dspark.benchmarks.feature_cache import draw_lengths, write_feature_cache
from dspark.benchmarks.machine import resident_memory
from dspark.benchmarks.plain_readers import (
    HOW,
    THREADS,
    FilePerSample,
    PaddedShards,
    PaddedShardsSliced,
    PlainReader,
    RaggedBinary,
    Row,
    batches_of,
)
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.schemas.fields import Field
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.order import StreamOrder
from dspark.train_from_cache.stream import RING, BatchStream, read_threads

FIELDS = ("input_ids", "attention_mask", "loss_mask", "last_hidden_state")
OURS, TRIMMED, BARE = "dspark", "dspark, --trim", "bare preadv"
ROOM = 200e6
# Batches before which workers start and memory is touched for the first time, and, of a warm pass,
# those that are counted.
FIRST, COUNTED = 8, 32


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument(
        "--gigabytes", type=command.positive, default=2.0, help="useful bytes of an epoch"
    )
    parser.add_argument("--hidden-size", type=command.count, default=1536)
    parser.add_argument("--max-length", type=command.count, default=2048)
    parser.add_argument("--mean-length", type=command.positive, default=671)
    parser.add_argument("--batch-size", type=command.count, default=8)
    command.add_repetitions(parser, 3)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.small:
        given.gigabytes, given.hidden_size, given.max_length = 0.004, 64, 256
        given.mean_length, given.repetitions = 84, 2
    if given.memory_of:
        print(_memory(given.memory_of, given.batch_size))
        return
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dspark-reader-") as folder:
        _measure(given, Path(folder)).report(Path(folder), given.json)


def _measure(given: argparse.Namespace, folder: Path) -> Result:
    root = folder / "cache"
    # Five layers and the last hidden state.
    token = 6 * 2 * given.hidden_size
    rows = max(4 * given.batch_size, round(given.gigabytes * 1e9 / given.mean_length / token))
    lengths = draw_lengths(rows, given.max_length, given.mean_length)
    write_feature_cache(
        root, lengths, shards=max(1, rows // 32), max_length=given.max_length,
        hidden_size=given.hidden_size, vocab_size=1024,
    )  # fmt: skip
    cache = open_cache(root)
    fields = read_fields(cache)
    readers = _write_plain(cache, fields, folder)
    epoch = order_of(cache, given.batch_size)
    _check_equal(cache, fields, readers, epoch[:2])
    counted = 8 if given.small else max(COUNTED, len(epoch))
    warm = _Warm(cache, fields, order_of(cache, given.batch_size, FIRST + counted))
    cold = _Cold(cache, fields, epoch)
    for repetition in range(given.repetitions):
        for reader in readers:
            warm.read_plain(reader, HOW if not (repetition or given.small) else None)
        warm.read(trim=False)
        warm.read(trim=True)
        cold.read_bare()
        cold.read()

    result = Result("reader", {**_parameters(given), "rows": rows, "read threads": read_threads()})
    names = [OURS, TRIMMED, *(reader.name for reader in readers)]
    result.measurements += [
        Measurement(warm.said(name), "GB/s", warm.rates[name], "warm") for name in names
    ]
    result.measurements += [
        Measurement(name, "GB/s", cold.rates[name], "cold") for name in (OURS, BARE)
    ]
    token_bytes = sum(field.token_bytes for field in fields)
    useful = sum(lengths) * token_bytes
    folders = {OURS: root, **{reader.name: reader.folder for reader in readers}}
    result.measurements += [
        Measurement(name, "bytes per useful byte", [_on_disk(path) / useful], "on disk")
        for name, path in folders.items()
    ]
    ring = RING * given.batch_size * given.max_length * token_bytes
    grown = _memory_elsewhere(root, given)
    result.measurements += [
        Measurement("anonymous memory of reading an epoch", "MB", [grown / 1e6], "memory"),
        Measurement("the ring", "MB", [ring / 1e6], "memory"),
    ]
    rivals = zip(*(warm.rates[reader.name] for reader in readers), strict=True)
    best = [max(rates) for rates in rivals]
    beyond = max(0.0, grown - ring) / 1e6
    result.targets += [
        Target("warm, against the best of the others", _ratios(warm.rates[OURS], best), 2.5, True),
        Target("cold, against bare preadv", _ratios(cold.rates[OURS], cold.rates[BARE]), 0.9, True),
        Target("memory beyond the ring", [beyond], ROOM / 1e6, False, "MB"),
    ]
    result.notes.append(
        f"Cold passes read {cold.share:.2f} bytes from the disk for each useful one (the last "
        f"pass). The first {FIRST} batches of a pass are not counted: workers start, and "
        "memory is touched for the first time. Anonymous memory is the growth of RssAnon from "
        "before the cache is opened, in a process of its own, the most over all batches. The "
        f"others have only the fields that are read on disk, {OURS} all."
    )
    return result


class _Warm:
    """Passes over files that are in the page cache.

    Attributes:
        rates: useful GB/s of each repetition, by what was read.
    """

    def __init__(self, cache: Cache, fields: Sequence[Field], batches: Sequence[list[int]]) -> None:
        self.rates: dict[str, list[float]] = {}
        self._cache, self._fields, self._batches = cache, fields, batches
        self._useful = _useful_bytes(cache, fields, batches[FIRST:])
        self._how: dict[str, str] = {}

    def read_plain(self, reader: PlainReader, hows: Sequence[str] | None) -> None:
        """Read another form: in all of ``hows``, or in the one that was the fastest of them."""
        found = {
            how: self._rate(batches_of(reader, self._batches, how))
            for how in hows or (self._how.get(reader.name, THREADS),)
        }
        self._how[reader.name] = max(found, key=lambda how: found[how])
        self.rates.setdefault(reader.name, []).append(max(found.values()))

    def read(self, *, trim: bool) -> None:
        """Read the cache."""
        size = len(self._batches[0])
        with BatchStream(
            self._cache, self._fields, self._batches, batch_size=size, trim=trim
        ) as stream:
            name = TRIMMED if trim else OURS
            self.rates.setdefault(name, []).append(self._rate(iter(stream)))

    def said(self, name: str) -> str:
        """The name of what was read, and how."""
        return f"{name} ({self._how[name]})" if name in self._how else name

    def _rate(self, loaded: Iterator[Row]) -> float:
        for _ in range(FIRST):
            next(loaded)
        start = time.perf_counter()
        for _ in loaded:
            pass
        return self._useful / (time.perf_counter() - start) / 1e9


class _Cold:
    """Passes over files that the page cache has dropped.

    Bytes count when the disk is asked for them: the reader is some batches ahead of those that it
    hands out, when the clock starts as well.

    Attributes:
        rates: useful GB/s of each repetition, by what was read.
        share: bytes that the last pass had the disk read for each useful one.
    """

    def __init__(self, cache: Cache, fields: Sequence[Field], batches: Sequence[list[int]]) -> None:
        self.rates: dict[str, list[float]] = {OURS: [], BARE: []}
        self.share = 0.0
        self._cache, self._fields, self._batches = cache, fields, batches
        first = min(FIRST, len(batches) // 2)
        self._first, self._counted = batches[:first], batches[first:]
        self._useful = _useful_bytes(cache, fields, batches)
        self._dropped, self._before, self._start = 0, 0, 0.0

    def read_bare(self) -> None:
        """Read the extents of the batches and nothing else."""
        self._drop()
        _read_bare(self._cache, self._fields, self._first)
        self._begin()
        _read_bare(self._cache, self._fields, self._counted)
        self._end(BARE)

    def read(self) -> None:
        """Read the batches. The clock starts when the first one that counts is asked for."""
        self._drop()
        with BatchStream(
            self._cache,
            self._fields,
            self._asked_for(),
            batch_size=len(self._batches[0]),
            trim=False,
        ) as stream:
            for _ in stream:
                pass
        self._end(OURS)

    def _asked_for(self) -> Iterator[list[int]]:
        yield from self._first
        self._begin()
        yield from self._counted

    def _drop(self) -> None:
        self._cache.close()
        _drop(self._cache.root)
        self._dropped = _bytes_from_disk()

    def _begin(self) -> None:
        self._before, self._start = _bytes_from_disk(), time.perf_counter()

    def _end(self, name: str) -> None:
        seconds, read = time.perf_counter() - self._start, _bytes_from_disk()
        self.share = (read - self._dropped) / self._useful
        self.rates[name].append((read - self._before) / self.share / seconds / 1e9)


def read_fields(cache: Cache) -> list[Field]:
    """What the ``dspark`` draft and its teacher read."""
    wanted = [f for f in cache.manifest.fields if f.name.startswith("hidden_states.")]
    return [*wanted, *(cache.field(name) for name in FIELDS)]


def order_of(cache: Cache, batch_size: int, steps: int | None = None) -> list[list[int]]:
    """Batches in a training's order, those of one epoch by default."""
    order = StreamOrder(ok_rows(cache), batch_size, (0, 0))
    return [order.rows_of_step(step) for step in range(steps or len(cache) // batch_size)]


def _write_plain(cache: Cache, fields: Sequence[Field], folder: Path) -> list[PlainReader]:
    """The other forms of the cache, in files of their own."""
    readers: list[PlainReader] = []
    for kind in (PaddedShards, PaddedShardsSliced, RaggedBinary, FilePerSample):
        at = folder / kind.form
        at.mkdir(exist_ok=True)
        readers.append(kind(at, fields, cache.manifest.max_length))
        readers[-1].write(cache)
    os.sync()
    return readers


def _check_equal(
    cache: Cache,
    fields: Sequence[Field],
    readers: Sequence[PlainReader],
    batches: Sequence[list[int]],
) -> None:
    """All forms must give the same numbers."""
    with BatchStream(cache, fields, batches, batch_size=len(batches[0]), trim=False) as stream:
        for batch in stream:
            rows = batch["sample"].tolist()
            for reader in readers:
                for name, tensor in next(batches_of(reader, [rows], HOW[0])).items():
                    tokens = tensor.shape[1]
                    assert tensor.equal(batch[name][:, :tokens]), (reader.name, name)
                    assert not batch[name][:, tokens:].any()


def _useful_bytes(cache: Cache, fields: Sequence[Field], batches: Sequence[list[int]]) -> int:
    tokens = sum(int(cache.lengths[rows].sum()) for rows in batches)
    return tokens * sum(field.token_bytes for field in fields)


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, others, strict=True)]


def _read_bare(cache: Cache, fields: Sequence[Field], batches: Sequence[list[int]]) -> None:
    """Every extent of the batches, in their order, with as many threads as ``BatchStream`` has;
    each reads into memory of its own."""
    manifest = cache.manifest
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    paths = CachePaths(cache.root, manifest.num_shards)
    files = [os.open(paths.shard(i), os.O_RDONLY) for i in range(manifest.num_shards)]
    rows = iter([row for batch in batches for row in batch])
    longest = max(field.row_bytes for field in fields)

    def work(_: int) -> None:
        memory = memoryview(bytearray(longest))
        for row in rows:
            shard, at = divmod(row, manifest.rows_per_shard)
            for field in fields:
                for offset, size in layout.row_extents(field, at, int(cache.lengths[row])):
                    assert os.preadv(files[shard], [memory[:size]], offset) == size

    threads = read_threads()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    for file in files:
        os.close(file)


def _drop(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _bytes_from_disk() -> int:
    """Bytes that this process had the disk read so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _memory(root: Path, batch_size: int) -> int:
    """Growth of this process's anonymous memory while it reads an epoch, in bytes."""
    before = most = resident_memory()
    cache = open_cache(root)
    batches = order_of(cache, batch_size)
    with BatchStream(
        cache, read_fields(cache), batches, batch_size=batch_size, trim=False
    ) as stream:
        for _ in stream:
            most = max(most, resident_memory())
    return most - before


def _memory_elsewhere(root: Path, given: argparse.Namespace) -> int:
    itself = [sys.executable, "-m", "dspark.benchmarks.reader", "--memory-of", str(root)]
    done = subprocess.run(
        [*itself, "--batch-size", str(given.batch_size)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _parameters(given: argparse.Namespace) -> dict[str, float]:
    names = ("gigabytes", "hidden_size", "max_length", "mean_length", "batch_size", "repetitions")
    return {name.replace("_", " "): getattr(given, name) for name in names}


if __name__ == "__main__":
    command.run(main)
