"""What it costs to train from a cache instead of from memory, and what padding costs.

    python -m benchmarks.train --json build/benchmarks/train.json

Trains a draft on random features, eagerly, by the trainer's own loop: once with batches that lie in
memory, and once with the same batches streamed from a cache whose files are in the page cache. Then
the same draft with batches of one fixed shape, trimmed, and bucketed and trimmed.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.benchmarks import command
from dspark.benchmarks.feature_cache import draw_lengths, write_feature_cache
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.evaluate import draft_fields
from dspark.train_from_cache.loop import run
from dspark.train_from_cache.options import TrainTask
from dspark.train_from_cache.order import training_order
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.progress import Progress
from dspark.train_from_cache.ranks import Ranks
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.trainee import Trainee

CONFIG = {
    "dspark": {"num_hidden_layers": 2, "num_anchors": 32, "markov_rank": 64},
    "msd": {},
}
MEMORY, CACHE, TRIM, BUCKET = "in memory", "from the cache", "--trim", "--bucket --trim"


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--arch", choices=[*CONFIG], default="dspark")
    parser.add_argument("--rows", type=command.count, default=160)
    parser.add_argument("--hidden-size", type=command.count, default=512)
    parser.add_argument("--vocab-size", type=command.count, default=4096)
    parser.add_argument("--max-length", type=command.count, default=512)
    parser.add_argument("--mean-length", type=command.positive, default=168)
    parser.add_argument("--batch-size", type=command.count, default=8)
    parser.add_argument(
        "--steps", type=command.count, default=6, help="measured in each repetition"
    )
    command.add_repetitions(parser, 3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    given = parser.parse_args()
    if given.small:
        given.rows, given.hidden_size, given.vocab_size, given.steps = 48, 64, 256, 3
        given.max_length, given.mean_length, given.repetitions, given.batch_size = 96, 32, 2, 4
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dspark-train-") as folder:
        _measure(given, Path(folder)).report(Path(folder), given.json)


@dataclass
class _Passes:
    """What the passes of one kind came to.

    Attributes:
        seconds: of a step, the wait for its batch included; the mean of each repetition.
        tokens: real tokens in a second.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def _measure(given: argparse.Namespace, folder: Path) -> Result:
    lengths = draw_lengths(given.rows, given.max_length, given.mean_length)
    cache = open_cache(
        write_feature_cache(
            folder / "cache", lengths, shards=4, max_length=given.max_length,
            hidden_size=given.hidden_size, vocab_size=given.vocab_size,
        )
    )  # fmt: skip
    bench = _Bench(given, cache, folder)
    held = list(bench.copies())
    found = {name: _Passes() for name in (MEMORY, CACHE, TRIM, BUCKET)}
    for _ in range(given.repetitions):
        bench.train(held, found[MEMORY])
        bench.train_from_cache(found[CACHE])
        bench.train_from_cache(found[TRIM], trim=True)
        bench.train_from_cache(found[BUCKET], trim=True, bucket=True)
    names = [
        *("arch", "rows", "hidden_size", "vocab_size", "max_length", "mean_length"),
        *("batch_size", "steps", "repetitions"),
    ]
    result = Result("train", {n.replace("_", " "): getattr(given, n) for n in names})
    result.parameters |= {"device": str(bench.ranks.device), "threads": torch.get_num_threads()}
    result.measurements += [
        *(
            Measurement(name, "ms", [1000 * s for s in found[name].seconds], "a step")
            for name in (MEMORY, CACHE)
        ),
        *(
            Measurement(said, "1/s", [1 / s for s in found[name].seconds], "steps")
            for said, name in (("fixed shape", CACHE), (TRIM, TRIM), (BUCKET, BUCKET))
        ),
        *(
            Measurement(said, "1/s", found[name].tokens, "real tokens")
            for said, name in (("fixed shape", CACHE), (TRIM, TRIM), (BUCKET, BUCKET))
        ),
    ]
    pairs = zip(found[CACHE].seconds, found[MEMORY].seconds, strict=True)
    result.targets.append(
        Target("a step, from the cache against in memory", [a / b for a, b in pairs], 1.03, False)
    )
    result.notes.append(
        "A step runs from the moment its batch is there to the moment the next one is; the first "
        "and last of each repetition are not counted."
    )
    return result


class _Bench:
    """A draft to train, again and again from its first weights."""

    def __init__(self, given: argparse.Namespace, cache: Cache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._task: dict[str, Any] = {
            "steps": given.steps + 2, "batch_size": given.batch_size, "eval_fraction": 0.0,
            "save_every": 10**9, "log_every": 10**9,
        }  # fmt: skip
        self._arch, self._passes = given.arch, 0
        self.ranks = Ranks(given.device, fsdp=False)
        self._head = TargetHead.load(cache.root).to(self.ranks.device)
        self._class = draft_class(given.arch)
        self._config = self._class.config_from_cache(cache.manifest, dict(CONFIG[given.arch]))
        self._fields = draft_fields(cache, self._class, self._config)

    def copies(self) -> Iterator[Batch]:
        """The batches of a training with one fixed shape, each in memory of its own."""
        with self._stream(self._plan()) as stream:
            for batch in stream:
                yield {name: tensor.clone() for name, tensor in batch.items()}

    def train_from_cache(self, into: _Passes, **options: bool) -> None:
        """Measure a training that streams its batches."""
        plan = self._plan(**options)
        with self._stream(plan) as stream:
            self.train(stream, into, plan)

    def train(self, batches: Iterable[Batch], into: _Passes, plan: Plan | None = None) -> None:
        """Measure a training."""
        plan = plan or self._plan()
        self._passes += 1
        out = self._folder / str(self._passes)
        out.mkdir()
        torch.manual_seed(0)
        draft = self._class(self._config).to(self.ranks.device)
        draft.attach_head(self._head)
        trainee = Trainee(self.ranks, draft, plan, out, None)
        moments: list[float] = []
        tokens: list[int] = []

        def noting() -> Iterator[Batch]:
            for batch in batches:
                moments.append(time.perf_counter())
                tokens.append(int(batch["length"].sum()))
                yield batch

        progress = Progress("", plan.steps, 0, enabled=False)
        run(self.ranks, [trainee], self._head, noting(), plan, progress)
        trainee.close()
        seconds = moments[-1] - moments[1]
        into.seconds.append(seconds / (len(moments) - 2))
        into.tokens.append(sum(tokens[1:-1]) / seconds)

    def _plan(self, **options: bool) -> Plan:
        rows = len(ok_rows(self._cache))
        task = TrainTask(self._cache.root, self._arch, **(self._task | options))
        return Plan.of(task, rows)

    def _stream(self, plan: Plan) -> BatchStream:
        order = training_order(self._cache, ok_rows(self._cache), plan)
        return BatchStream(
            self._cache,
            self._fields,
            [order.rows_of_step(step) for step in range(plan.steps)],
            batch_size=plan.batch_size,
            trim=plan.trim,
            device=self.ranks.device,
        )


if __name__ == "__main__":
    command.run(main)
