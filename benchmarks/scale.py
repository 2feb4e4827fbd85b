"""How time and memory grow with shards and rows, and what the largest captures come to.

    python -m benchmarks.scale
    python -m benchmarks.scale --json docs/performance/scale.json

Caches of 10 to 10,000 shards and 10³ to 10⁶ rows have holes in the place of features; larger ones
have no shards at all and are only opened. Each operation is done by a process of its own on files
that are in the page cache. Memory is anonymous: what the process holds afterwards, or, of
``finish`` and ``verify``, took at most. A line through the medians, and operations and requests
counted at small size, say on paper what 10⁹ tokens and 1,000 workers come to.
"""

import multiprocessing
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from dspark.benchmarks import command
from dspark.benchmarks import scale_operations as operations
from dspark.benchmarks.file_operations import can_count, count_operations
from dspark.benchmarks.hollow_cache import write_hollow_cache
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.benchmarks.scale_operations import Cost, Costs
from dspark.benchmarks.store_traffic import measure_store

Size = tuple[int, int]
"""Rows and shards."""

WHOLE: Sequence[Size] = (
    *((100_000, 10), (100_000, 100), (100_000, 1_000), (100_000, 10_000)),
    *((1_000, 1_000), (10_000, 1_000), (1_000_000, 1_000)),
)
BARE: Sequence[Size] = ((1_000_000, 100_000), (10_000_000, 100_000))
_SMALL_WHOLE: Sequence[Size] = ((200, 10), (200, 40), (800, 10))
_SMALL_BARE: Sequence[Size] = ((20_000, 1_000),)

_TOKENS, _MEAN_LENGTH, _WORKERS = 10**9, 671, 1_000
_ROWS = -(-_TOKENS // _MEAN_LENGTH)

_READING = """
import sys, dspark
root, row, near, far = sys.argv[1], *map(int, sys.argv[2:])
dspark.open_cache(root)
mark("opening")
cache = dspark.open_cache(root)
mark("")
cache[row]
mark("a row of an open shard")
cache[near]
mark("a row of another shard")
cache[far]
mark("")
"""
_CAPTURE = """
import sys, dspark
mark("")
for shards, name in ((2, "few"), (6, "many")):
    mark(name)
    dspark.capture(shards, out=f"{sys.argv[1]}/{name}", limit=6, progress=False)
mark("")
"""


def main() -> None:
    parser = command.parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--repeat", type=command.count, default=3, help="times that each is measured"
    )
    parser.add_argument(
        "--folder", type=command.folder, help="of the caches; by default that of temporary"
    )
    options = parser.parse_args()
    whole, bare = (_SMALL_WHOLE, _SMALL_BARE) if options.small else (WHOLE, BARE)
    result = Result("scale", {"repetitions": options.repeat, "page cache": "warm"})
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        found = {
            (size, is_bare): measure(folder, size, is_bare, options.repeat)
            for sizes, is_bare in ((whole, False), (bare, True))
            for size in sizes
        }
        _add_measurements(result, found)
        _add_targets(result, found, whole, bare)
        _add_paper(result, found, folder, capture=not options.small)
        result.report(folder, options.json)


def measure(folder: Path, size: Size, bare: bool, repeat: int) -> list[Costs]:
    """What the operations cost at one size, for each repetition.

    Args:
        folder: for the cache, which is removed afterwards.
        size: rows and shards.
        bare: only what a cache is opened with.
        repeat: times.
    """
    small, root = folder / "small", folder / "cache"
    if not small.exists():
        write_hollow_cache(small, 100, 10)
    write_hollow_cache(root, *size, bare=bare)
    actions = [operations.read]
    if not bare:
        actions += [operations.complete, operations.verify]
    costs: list[dict[str, Cost]] = []
    try:
        for _ in range(repeat):
            costs.append({})
            for action in actions:
                with _new_process() as process:
                    done = process.submit(operations.after_warming, action, small, root)
                    costs[-1] |= done.result()
    finally:
        shutil.rmtree(root)
    return list(costs)


def _new_process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([operations.__name__])
    return ProcessPoolExecutor(1, context)


_Found = dict[tuple[Size, bool], list[Costs]]


def _add_measurements(result: Result, found: _Found) -> None:
    for name in dict.fromkeys(name for costs in found.values() for name in costs[0]):
        for kind, unit, scale in (("seconds", "ms", 1e3), ("memory", "MB", 1e-6)):
            if kind == "memory" and name in (operations.STEP, operations.FIRST_ROW, operations.ROW):
                continue
            for ((rows, shards), bare), costs in found.items():
                if name in costs[0]:
                    result.measurements.append(
                        Measurement(
                            f"{shards:,} shards, {rows:,} rows" + (", bare" if bare else ""),
                            unit,
                            [getattr(cost[name], kind) * scale for cost in costs],
                            f"{name}: {'time' if unit == 'ms' else 'memory'}",
                        )
                    )


def _add_targets(
    result: Result, found: _Found, whole: Sequence[Size], bare: Sequence[Size]
) -> None:
    def values(size: Size, is_bare: bool, name: str, kind: str) -> list[float]:
        return [float(getattr(cost[name], kind)) for cost in found[size, is_bare]]

    rows, shards = bare[0]
    where = f"a cache of {shards:,} shards and {rows:,} rows"
    opening = operations.OPENING
    seconds = values(bare[0], True, opening, "seconds")
    megabytes = [size / 1e6 for size in values(bare[0], True, opening, "memory")]
    result.targets += [
        Target(f"opening {where}", seconds, 2, at_least=False, unit="s"),
        Target(f"memory of {where}, opened", megabytes, 20, at_least=False, unit="MB"),
    ]
    rows, shards = bare[-1]
    held = [
        (a + b) / rows
        for a, b in zip(
            values(bare[-1], True, opening, "memory"),
            values(bare[-1], True, operations.ORDER, "memory"),
            strict=True,
        )
    ]
    name = f"memory of a training's rows and order, {shards:,} shards and {rows:,} rows"
    result.targets.append(Target(name, held, 1, at_least=False, unit="bytes a row"))
    least = values(min(whole), False, operations.ROW, "seconds")
    most = values(max(whole), False, operations.ROW, "seconds")
    ratios = [a / b for a, b in zip(most, least, strict=True)]
    name = f"a random row of {max(whole)[0]:,} rows against one of {min(whole)[0]:,}"
    result.targets.append(Target(name, ratios, 1.5, at_least=False))


def _add_paper(result: Result, found: _Found, folder: Path, *, capture: bool) -> None:
    """Fitted lines and counts, as sentences, and what they come to at large."""
    for shards in (10_000, 100_000):
        parts = []
        for name, kind, unit, scale in (
            (operations.OPENING, "seconds", "s", 1.0),
            (operations.FINISH, "seconds", "s", 1.0),
            (operations.FINISH, "memory", "MB", 1e-6),
            (operations.VERIFY, "seconds", "s", 1.0),
            (operations.VERIFY, "memory", "MB", 1e-6),
        ):
            points = {
                size: statistics.median(getattr(cost[name], kind) for cost in costs)
                for (size, _), costs in found.items()
                if name in costs[0]
            }
            fixed, by_row, by_shard = fit(points)
            amount = (fixed + by_row * _ROWS + by_shard * shards) * scale
            parts.append(f"{name} {amount:,.3g} {unit}")
        result.notes.append(
            f"10⁹ tokens ({_ROWS:,} rows of {_MEAN_LENGTH}) in {shards:,} shards, by a line "
            f"through the medians: {', '.join(parts)}; {2 * shards:,} files of shards and indexes, "
            "and those of target/, manifest.json and index/columns.safetensors."
        )
    _add_file_operations(result, folder, capture)
    _add_store_traffic(result)


def fit(points: dict[Size, float]) -> tuple[float, float, float]:
    """A fixed cost, that of a row and that of a shard, none negative, by relative least squares.

    Args:
        points: cost by rows and shards.
    """
    costs = np.array([max(cost, 1e-9) for cost in points.values()])
    columns = np.array([[1, *size] for size in points], float) / costs[:, None]
    chosen = [0, 1, 2]
    while True:
        weights = np.zeros(3)
        weights[chosen] = np.linalg.lstsq(columns[:, chosen], np.ones(len(costs)), rcond=None)[0]
        if (weights >= 0).all():
            fixed, by_row, by_shard = weights.tolist()
            return fixed, by_row, by_shard
        chosen.remove(int(weights.argmin()))


def _add_file_operations(result: Result, folder: Path, capture: bool) -> None:
    if not can_count():
        result.notes.append("Operations on files were not counted: strace cannot be used here.")
        return
    root = folder / "counted"
    rows, shards = 400, 40
    write_hollow_cache(root, rows, shards)
    counts = count_operations(_READING, root, str(root), "0", "1", str(rows // 2))
    for name, counted in counts.items():
        if name:
            result.notes.append(f"Operations on files, {name}: {_said(counted)}.")
    if not capture:
        return
    captures = folder / "captures"
    captures.mkdir()
    counts = count_operations(_CAPTURE, captures, str(captures))
    of_shard = Counter({kind: (n - counts["few"][kind]) / 4 for kind, n in counts["many"].items()})
    result.notes.append(
        f"Operations on files, a shard of a capture, all scans of its start and end among them: "
        f"{_said(of_shard)}."
    )


def _said(counted: Counter[str]) -> str:
    return ", ".join(f"{n:g} {kind}" for kind, n in sorted(counted.items())) or "none"


def _add_store_traffic(result: Result) -> None:
    store = measure_store(500)
    # A worker reports at most every half second while it captures.
    reports = 2 * _WORKERS
    requests = reports * store.report_requests
    result.notes.append(
        f"The store of a capture's workers: {store.draw_bytes:.0f} bytes and 1 request a shard; "
        f"{store.report_bytes:.0f} bytes and {store.report_requests} requests a report of "
        f"progress, so that {_WORKERS:,} workers send at most {requests:,} requests and "
        f"{reports * store.report_bytes / 1e6:.2f} MB a second, whatever the shards. One worker "
        f"alone gets an answer in {store.request_seconds * 1e6:.0f} µs here."
    )


if __name__ == "__main__":
    command.run(main)
