"""The progress line of a verification."""

import sys

from tqdm import tqdm


class VerifyProgress:
    """One line: bytes read, bytes/s, time left."""

    def __init__(self, total: int, *, show: bool) -> None:
        # A log file gets a line every half minute, a terminal a smooth bar.
        self._bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            disable=not show,
            desc="verify",
            mininterval=0.1 if sys.stderr.isatty() else 30,
        )
        self.bytes = 0

    def __enter__(self) -> "VerifyProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, size: int) -> None:
        self.bytes += size
        self._bar.update(size)
