"""What is wrong with a cache, and where."""

from dataclasses import dataclass
from pathlib import Path

from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: path inside the cache.
        problem: what is wrong with it, in words.
        shard: that the file belongs to; None for the manifest and the files of ``target/``.
        sample: dataset row, where the fault is one row's.
        field: stored tensor, where the fault is one tensor's.
        part: of the shard: 0 its first file, K that of the K-th extension (see ``schemas.parts``).
    """

    file: str
    problem: str
    shard: int | None = None
    sample: int | None = None
    field: str | None = None
    part: int = 0

    def __str__(self) -> str:
        where = "" if self.sample is None else f", dataset row {self.sample}"
        where += "" if self.field is None else f", field {self.field}"
        return f"{self.file}{where}: {self.problem}"


@dataclass(frozen=True)
class Unreadable(Fault):
    """What the system does not let be read, so that it may be sound.

    Attributes:
        way_out: what makes it readable.
    """

    way_out: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.way_out}"


def unreadable(
    error: UnreadableError, file: str, shard: int | None = None, part: int = 0
) -> Unreadable:
    """What a reader could not read."""
    return Unreadable(file, error.problem, shard, part=part, way_out=error.way_out)


def reading_fault(error: OSError, file: str, shard: int | None = None, part: int = 0) -> Fault:
    """A failure to look at or read a file."""
    said = UnreadableError(Path(file), error)
    if is_unreadable(error):
        return unreadable(said, file, shard, part)
    return Fault(file, said.problem, shard, part=part)


def by_place(fault: Fault) -> tuple[int, int, str, str]:
    """Sort key: what is no shard's first, then by shard, row and field."""
    return (
        -1 if fault.shard is None else fault.shard,
        -1 if fault.sample is None else fault.sample,
        fault.file,
        fault.field or "",
    )


def problem_of(error: IncompatibleCacheError, path: Path) -> str:
    """What a reader's message says of the file ``path``, without its name and the way out."""
    text = str(error).removeprefix(f"{path}: ")
    return text.rpartition("; ")[0] or text
