"""The progress line of a conversion."""

import sys
from collections.abc import Sequence

from tqdm import tqdm

from dspark.schemas.manifest import Manifest


class ConvertProgress:
    """One line: dataset rows converted, rows/s, time left.

    Args:
        manifest: of the new cache.
        shards: that this job converts.
        show: show a line at all.

    Attributes:
        converted: shards that are there now.
    """

    def __init__(self, manifest: Manifest, shards: Sequence[int], *, show: bool) -> None:
        self.converted = 0
        self._manifest = manifest
        self._bar = tqdm(
            total=sum(len(manifest.rows_of(shard)) for shard in shards),
            unit="sample",
            disable=not show,
            desc="convert",
            # A log file gets a line every half minute, a terminal a smooth bar.
            mininterval=0.1 if sys.stderr.isatty() else 30,
        )

    def __enter__(self) -> "ConvertProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, shard: int, done: bool) -> None:
        """A shard is there now, or left to another job."""
        self.converted += done
        self._bar.update(len(self._manifest.rows_of(shard)))
