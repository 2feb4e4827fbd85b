"""The progress line of a capture: one for the whole job."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tqdm import tqdm

from dspark.capture.workers.job import Job
from dspark.schemas.manifest import Manifest

_SECONDS_BETWEEN_REPORTS = 0.5


@dataclass
class Step:
    """Progress made: finished dataset rows, their stored tokens, bytes written, whole shards."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: int = 0


class CaptureProgress:
    """Adds up the steps of all workers; the first one shows them: samples done, samples/s, shards,
    tokens/s, bytes written, time left.

    Args:
        job: of this worker.
        manifest: of the cache.
        committed: shards that were there before.
        show: show a line at all.

    Attributes:
        done: what the whole job has done, as of the last report.
    """

    def __init__(
        self, job: Job, manifest: Manifest, committed: Sequence[int], *, show: bool
    ) -> None:
        self._job = job
        self._shards = manifest.num_shards
        self._committed = len(committed)
        self._pending = Step()
        self.done = Step()
        self._start = self._reported = time.monotonic()
        self._bar = tqdm(
            total=manifest.num_samples,
            initial=sum(len(manifest.rows_of(shard)) for shard in committed),
            unit="sample",
            disable=not (show and job.is_first),
            desc="capture",
            # A log file gets a line every half minute, a terminal a smooth bar.
            mininterval=0.1 if sys.stderr.isatty() else 30,
        )

    def __enter__(self) -> "CaptureProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, step: Step) -> None:
        for field in fields(Step):
            value = getattr(self._pending, field.name) + getattr(step, field.name)
            setattr(self._pending, field.name, value)
        if time.monotonic() - self._reported > _SECONDS_BETWEEN_REPORTS:
            self.report()

    def report(self) -> None:
        """Tell the job what this worker did; as the first one, show what all did."""
        before = self.done.samples
        for field in fields(Step):
            count = self._job.count(field.name, getattr(self._pending, field.name))
            setattr(self.done, field.name, count)
        self._pending = Step()
        self._reported = time.monotonic()
        rate = self.done.tokens / max(self._reported - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"{self._committed + self.done.shards}/{self._shards} shards, "
            f"{rate:,.0f} tokens/s, {self.done.bytes / 1e6:,.1f} MB",
            refresh=False,
        )
        self._bar.update(self.done.samples - before)
