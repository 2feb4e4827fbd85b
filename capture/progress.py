"""The progress line of a capture."""

import sys
import time

from tqdm import tqdm

from dspark.capture.shard import Step


class CaptureProgress:
    """One line: samples done, samples/s, tokens/s, bytes written, time left."""

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        # A log file gets a line every half minute, a terminal a smooth bar.
        seconds = 0.1 if sys.stderr.isatty() else 30
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="sample",
            disable=not show,
            desc="capture",
            mininterval=seconds,
        )
        self._start = time.monotonic()
        self._tokens = 0
        self.bytes_written = 0

    def __enter__(self) -> "CaptureProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, step: Step) -> None:
        self._tokens += step.tokens
        self.bytes_written += step.bytes
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"{rate:,.0f} tokens/s, {self.bytes_written / 1e6:,.1f} MB", refresh=False
        )
        self._bar.update(step.samples)
