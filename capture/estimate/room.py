"""Whether what is still to be captured fits on the disk of ``--out``."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Fit(StrEnum):
    """Whether a capture fits; ``UNSURE`` is within the error of the estimate."""

    FITS = "fits"
    UNSURE = "may not fit"
    NOT = "does not fit"


@dataclass(frozen=True)
class Room:
    """Attributes:
    out: the cache directory.
    free_bytes: of the disk that holds it, or will.
    keeps_holes: whether padding takes no room there.
    shards: still to capture.
    disk_bytes: that these, and the target's head if it is not there yet, take with holes.
    file_bytes: the same without.
    relative_error: of ``disk_bytes``, as a share of it.
    """

    out: Path
    free_bytes: int
    keeps_holes: bool
    shards: int
    disk_bytes: int
    file_bytes: int
    relative_error: float

    @property
    def fit(self) -> Fit:
        if self.file_bytes <= self.free_bytes:
            return Fit.FITS
        error = self.relative_error * self.disk_bytes
        if not self.keeps_holes or self.disk_bytes - error > self.free_bytes:
            return Fit.NOT
        return Fit.FITS if self.disk_bytes + error <= self.free_bytes else Fit.UNSURE
