"""What a verification found."""

from dataclasses import dataclass
from pathlib import Path

from dspark.schemas.manifest import Manifest
from dspark.verify.faults import Fault, Unreadable

SOUND, DAMAGED, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        root: the cache; of one at a URL, the temporary folder that stood for it.
        manifest: of the cache; None if it is damaged, which leaves the rest unchecked.
        deep: whether each row's bytes were read.
        shards: committed shards, all of them checked.
        rows: captured samples in those of them that can be read.
        bytes_read: of shards and target files.
        seconds: that it took.
        faults: what is damaged, in the order of shards and rows.
        unreadable: what the system does not let be read, in the same order; it may be sound.
        notes: what does no harm: extensions that are not finished, and files that are no part of
            the cache.
        url: of a cache that is at one.
    """

    root: Path
    manifest: Manifest | None
    deep: bool
    shards: int
    rows: int
    bytes_read: int
    seconds: float
    faults: tuple[Fault, ...]
    unreadable: tuple[Unreadable, ...]
    notes: tuple[str, ...]
    url: str | None = None

    @property
    def location(self) -> str:
        """What the cache is called: its directory, or its URL."""
        return self.url or str(self.root)

    @property
    def complete(self) -> bool:
        """Whether the capture is finished."""
        return self.manifest is not None and self.manifest.complete

    @property
    def extensions_to_finish(self) -> list[int]:
        """Numbers of the extensions, from 1, that are unfinished or damaged."""
        if self.manifest is None:
            return []
        damaged = {fault.part for fault in self.faults}
        return [
            number
            for number, extension in enumerate(self.manifest.extensions, 1)
            if number in damaged or not extension.complete
        ]

    @property
    def capture_to_finish(self) -> bool:
        """Whether the capture itself is unfinished or damaged, whatever was added to it."""
        return not self.complete or any(fault.part == 0 for fault in self.faults)

    @property
    def exit_code(self) -> int:
        """0 sound, 1 damaged, 2 cannot tell: nothing is wrong so far, but not all can be read.

        That is so where shards are still to be captured, and where the system does not let a file
        be read.
        """
        if self.faults:
            return DAMAGED
        return SOUND if self.complete and not self.unreadable else UNKNOWN
