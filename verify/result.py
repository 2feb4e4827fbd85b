"""What a verification found."""

from dataclasses import dataclass
from pathlib import Path

from dspark.schemas.manifest import Manifest
from dspark.verify.faults import Fault

SOUND, DAMAGED, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        root: the cache.
        manifest: of the cache; None if it is damaged, which leaves the rest unchecked.
        deep: whether each row's bytes were read.
        shards: committed shards, all of them checked.
        rows: captured samples in those of them that can be read.
        bytes_read: of shards and target files.
        seconds: that it took.
        faults: in the order of shards and rows.
        notes: files that are no part of the cache and do no harm.
    """

    root: Path
    manifest: Manifest | None
    deep: bool
    shards: int
    rows: int
    bytes_read: int
    seconds: float
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the capture is finished."""
        return self.manifest is not None and self.manifest.complete

    @property
    def exit_code(self) -> int:
        """0 sound, 1 damaged, 2 cannot tell: nothing is wrong so far, but shards are missing."""
        if self.faults:
            return DAMAGED
        return SOUND if self.complete else UNKNOWN
