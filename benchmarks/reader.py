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

from dspark.benchmarks.feature_cache import draw_lengths, write_feature_cache
from dspark.benchmarks.machine import resident_memory
from dspark.benchmarks.plain_readers import (
    HOW,
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
OURS, BARE = "dspark", "bare preadv"
ROOM = 200e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="useful bytes of an epoch")
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--mean-length", type=float, default=671)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="some seconds, to see that it works")
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
    batches = order_of(cache, given.batch_size)
    readers = _write_plain(cache, fields, folder)
    _check_equal(cache, fields, readers, batches[:2])
    every = {OURS: root, **{reader.name: reader.folder for reader in readers}}
    sizes = {name: _on_disk(path) for name, path in every.items()}

    token_bytes = sum(field.token_bytes for field in fields)
    bytes_of_epoch = _bytes(cache, batches, token_bytes)
    warm: dict[str, list[float]] = {}
    cold: dict[str, list[float]] = {}
    best_of: dict[str, str] = {}
    for repetition in range(given.repetitions):
        for reader in readers:
            hows = HOW if not repetition else (best_of[reader.name],)
            found = {}
            for how in hows:
                found[how] = _rate(batches_of(reader, batches, how), cache, batches, token_bytes)
            best_of[reader.name] = max(found, key=lambda how: found[how])
            warm.setdefault(reader.name, []).append(max(found.values()))
        for trim in (False, True):
            with BatchStream(
                cache, fields, batches, batch_size=given.batch_size, trim=trim
            ) as stream:
                name = f"{OURS}, --trim" if trim else OURS
                rate = _rate(iter(stream), cache, batches, token_bytes)
                warm.setdefault(name, []).append(rate)
        for name in (BARE, OURS):
            _drop(root)
            cache.close()
            before, start = _blocks_read(), time.perf_counter()
            if name == BARE:
                _read_bare(cache, fields, batches)
            else:
                with BatchStream(
                    cache, fields, batches, batch_size=given.batch_size, trim=False
                ) as stream:
                    for _ in stream:
                        pass
            cold.setdefault(name, []).append(bytes_of_epoch / (time.perf_counter() - start) / 1e9)
            share = (_blocks_read() - before) / bytes_of_epoch
        cache.close()

    result = Result("reader", {**_parameters(given), "rows": rows, "read threads": read_threads()})
    names = [OURS, f"{OURS}, --trim", *(r.name for r in readers)]
    result.measurements += [Measurement(_said(n, best_of), "GB/s", warm[n], "warm") for n in names]
    result.measurements += [Measurement(n, "GB/s", cold[n], "cold") for n in (OURS, BARE)]
    result.measurements += [
        Measurement(name, "bytes per useful byte", [size / (sum(lengths) * token_bytes)], "on disk")
        for name, size in sizes.items()
    ]
    ring = RING * given.batch_size * given.max_length * token_bytes
    grown = _memory_elsewhere(root, given)
    result.measurements += [
        Measurement("anonymous memory of reading an epoch", "MB", [grown / 1e6], "memory"),
        Measurement("the ring", "MB", [ring / 1e6], "memory"),
    ]
    rivals = [max(warm[r.name][i] for r in readers) for i in range(given.repetitions)]
    result.targets += [
        Target(
            "warm, against the best of the others",
            [ours / best for ours, best in zip(warm[OURS], rivals, strict=True)],
            2.5,
            at_least=True,
        ),
        Target(
            "cold, against bare preadv",
            [ours / bare for ours, bare in zip(cold[OURS], cold[BARE], strict=True)],
            0.9,
            at_least=True,
        ),
        Target("memory beyond the ring", [max(0.0, grown - ring) / 1e6], ROOM / 1e6, False, "MB"),
    ]
    result.notes.append(
        f"Cold passes read {share:.2f} bytes from the disk for each useful one (the last pass). "
        "Anonymous memory is the growth of RssAnon from before the cache is opened, in a process "
        "of its own, at most over all batches. The others have only the fields that are read on "
        f"disk, {OURS} all."
    )
    return result


def read_fields(cache: Cache) -> list[Field]:
    """What the ``dspark`` draft and its teacher read."""
    wanted = [f for f in cache.manifest.fields if f.name.startswith("hidden_states.")]
    return [*wanted, *(cache.field(name) for name in FIELDS)]


def order_of(cache: Cache, batch_size: int) -> list[list[int]]:
    """An epoch of batches in a training's order."""
    order = StreamOrder(ok_rows(cache), batch_size, (0, 0))
    return [order.rows_of_step(step) for step in range(len(cache) // batch_size)]


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
        for i, batch in enumerate(stream):
            for reader in readers:
                for name, tensor in next(batches_of(reader, batches[i:], HOW[0])).items():
                    tokens = tensor.shape[1]
                    assert tensor.equal(batch[name][:, :tokens]), (reader.name, name)
                    assert not batch[name][:, tokens:].any()


def _rate(
    loaded: Iterator[Row], cache: Cache, batches: Sequence[list[int]], token_bytes: int
) -> float:
    """Useful GB/s of all batches but the first, before which workers are started."""
    next(loaded)
    start = time.perf_counter()
    for _ in loaded:
        pass
    return _bytes(cache, batches[1:], token_bytes) / (time.perf_counter() - start) / 1e9


def _bytes(cache: Cache, batches: Sequence[list[int]], token_bytes: int) -> int:
    return sum(int(cache.lengths[rows].sum()) for rows in batches) * token_bytes


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


def _blocks_read() -> int:
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
    command = [sys.executable, "-m", "dspark.benchmarks.reader", "--memory-of", str(root)]
    done = subprocess.run(
        [*command, "--batch-size", str(given.batch_size)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _parameters(given: argparse.Namespace) -> dict[str, float]:
    names = ("gigabytes", "hidden_size", "max_length", "mean_length", "batch_size", "repetitions")
    return {name.replace("_", " "): getattr(given, name) for name in names}


def _said(name: str, best_of: dict[str, str]) -> str:
    return f"{name} ({best_of[name]})" if name in best_of else name


if __name__ == "__main__":
    main()
