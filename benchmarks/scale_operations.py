"""What is done with a cache, each in a process that does nothing else."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark.benchmarks.machine import peak_memory, resident_memory
from dspark.capture.finish import finish
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.order import StreamOrder
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.stream import BatchStream
from dspark.verify.run import verify_cache

BATCH = 16
_STEPS = 1000
_RANDOM_SHARDS = 200

OPENING = "opening"
ORDER = "split and order of a training"
STEP = "rows of a step"
FIRST_BATCH = "from nothing to the first batch"
FIRST_ROW = "a random row of a shard not open yet"
ROW = "a random row of an open shard"
FINISH = "capture's finish"
VERIFY = "verify, shallow"


@dataclass(frozen=True)
class Cost:
    """Attributes:
    seconds: that it took.
    memory: bytes that it holds, or of ``finish`` and ``verify`` that it took at most.
    """

    seconds: float
    memory: int


Costs = Mapping[str, Cost]


def read(root: Path) -> dict[str, Cost]:
    """Open a cache, and read from it as a training and as a user would."""
    start, before = time.perf_counter(), resident_memory()
    opening = _cost(start, before)
    cache = open_cache(root)
    costs = {OPENING: opening()}
    order, ordering = _order(cache)
    costs |= ordering
    if not CachePaths(root, cache.manifest.num_shards).index(0).exists():
        return costs
    fields = list(cache.manifest.all_fields)
    steps = map(order.rows_of_step, range(2))
    with BatchStream(cache, fields, steps, batch_size=BATCH, trim=False) as stream:
        next(iter(stream))
        costs[FIRST_BATCH] = opening()
    return costs | _random_rows(root)


def _order(cache: Cache) -> tuple[StreamOrder, dict[str, Cost]]:
    ordering = _cost(time.perf_counter(), resident_memory())
    train, _ = split_rows(ok_rows(cache), 0.1)
    order = StreamOrder(train, BATCH, (0, 0))
    order.rows_of_step(0)
    costs = {ORDER: ordering()}
    stepping = _cost(time.perf_counter(), resident_memory(), _STEPS)
    for step in range(_STEPS):
        order.rows_of_step(step)
    return order, costs | {STEP: stepping()}


def _random_rows(root: Path) -> dict[str, Cost]:
    """Read a row of each of some shards, and the same rows again."""
    costs = {}
    draw = random.Random(0)
    with open_cache(root) as cache:
        some = min(_RANDOM_SHARDS, cache.manifest.num_shards)
        shards = draw.sample(range(cache.manifest.num_shards), some)
        rows = [draw.choice(cache.manifest.rows_of(shard)) for shard in shards]
        for name in (FIRST_ROW, ROW):
            reading = _cost(time.perf_counter(), resident_memory(), len(rows))
            for row in rows:
                cache[row]
            costs[name] = reading()
    return costs


def complete(root: Path) -> dict[str, Cost]:
    """What the first worker of a capture does after the last shard."""
    manifest = read_manifest(root).unfinished()
    return {FINISH: _peak(lambda: finish(manifest, CachePaths(root, manifest.num_shards)))}


def verify(root: Path) -> dict[str, Cost]:
    return {VERIFY: _peak(lambda: verify_cache(root))}


def _cost(start: float, before: int, parts: int = 1) -> Callable[[], Cost]:
    """What has been spent since, for each of ``parts``; memory is that of all together."""
    return lambda: Cost((time.perf_counter() - start) / parts, max(0, resident_memory() - before))


def _peak(action: Callable[[], object]) -> Cost:
    before, start = peak_memory(), time.perf_counter()
    action()
    return Cost(time.perf_counter() - start, peak_memory() - before)


def after_warming(action: Callable[[Path], dict[str, Cost]], small: Path, root: Path) -> Costs:
    """Do something with a small cache, so that all code is loaded, and then with another."""
    action(small)
    return action(root)
