"""The directory that shards are fetched into: bounded, and shared by the processes of a machine.

    DIR/lock                                    held by whoever makes room
    DIR/NAME-DIGEST/                            a mirror: small files of one cache (``mirror``)
    DIR/NAME-DIGEST/shards/STEM/FIELD.safetensors   one field of one shard: a *unit*

A unit gets its name when every row in it was compared with its digest. Until then it has a
temporary name and is locked. Its disk blocks are taken before its bytes are fetched, so the blocks
of all files say how much room there is, whoever fetches.
"""

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.durable import make_dir, names, tmp_path
from dspark.schemas.locks import is_locked, lock

_BLOCK = 512  # the unit of st_blocks, whatever the file system's own
_PAGE = 4096
_RESERVE = 0.05
"""Share of the disk that stays free where no size is given."""


@dataclass(frozen=True)
class Wanted:
    """A unit to be fetched.

    Attributes:
        path: its final name.
        size: bytes of the file, holes included.
        extents: (offset, bytes) of all that will be written.
    """

    path: Path
    size: int
    extents: Sequence[tuple[int, int]]

    @property
    def bytes(self) -> int:
        """What it may take on disk, at most."""
        pages = sum(-(-size // _PAGE) + 1 for _, size in self.extents)
        return _PAGE * min(pages, -(-self.size // _PAGE) + 1)


class LocalCache:
    """The directory.

    Args:
        folder: made if it is not there.
        limit: bytes that the units may take; by default what is free, less a reserve.

    Attributes:
        folder: see above.
        limit: see above.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        make_dir(folder)
        self.folder = folder
        if limit is None:
            disk = shutil.disk_usage(folder)
            limit = self.used() + max(0, disk.free - int(_RESERVE * disk.total))
        self.limit = limit

    def used(self) -> int:
        """Bytes on disk of all units, those that are being fetched included."""
        return sum(found.st_blocks * _BLOCK for _, found in self._files())

    def reserve(
        self, wanted: Sequence[Wanted], keep: Callable[[Path], bool]
    ) -> list["Reservation"] | None:
        """Take the room for units, and the right to fetch them.

        Units that were used longest ago are removed for it. Processes that have one open read on.

        Args:
            wanted: units that are not there.
            keep: whether a unit must stay.

        Returns:
            A reservation for each that nobody else is fetching; None where there is no room.
        """
        with self._locked():
            claimed: list[Reservation] = []
            try:
                for unit in wanted:
                    make_dir(unit.path.parent)
                    if unit.path.exists():
                        continue
                    with suppress(ClaimedError):
                        reservation = Reservation(unit, Claim(unit.path))
                        if unit.path.exists():  # it was published a moment ago
                            reservation.close()
                        else:
                            claimed.append(reservation)
                if not self._make_room(sum(r.unit.bytes for r in claimed), keep):
                    for reservation in claimed:
                        reservation.close()
                    return None
                for reservation in claimed:
                    reservation.allocate()
            except BaseException:
                for reservation in claimed:
                    reservation.close()
                raise
        return claimed

    def _make_room(self, size: int, keep: Callable[[Path], bool]) -> bool:
        files = []
        used = 0
        for path, found in self._files():
            used += found.st_blocks * _BLOCK
            if path.suffix != ".tmp":
                if not keep(path):
                    files.append((found.st_mtime_ns, path, found.st_blocks * _BLOCK))
            elif not is_locked(path):  # left by a process that was killed
                path.unlink(missing_ok=True)
                used -= found.st_blocks * _BLOCK
        if used - sum(freed for _, _, freed in files) + size > self.limit:
            return False
        for _, path, freed in sorted(files):
            if used + size <= self.limit:
                break
            path.unlink(missing_ok=True)
            used -= freed
        return True

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.glob("*/shards/*/*"):
            with suppress(FileNotFoundError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with FileIO(self.folder / "lock", "ab") as file:
            lock(file.fileno(), wait=True)
            yield


class Reservation:
    """The right to fetch a unit, and the room for it, until ``close``.

    Attributes:
        unit: to be fetched.
        file: to write it to.
    """

    def __init__(self, unit: Wanted, claim: Claim) -> None:
        self.unit = unit
        self.file = claim.file
        self._claim = claim

    def allocate(self) -> None:
        """Take the disk blocks, with holes between them."""
        with names(self.unit.path):
            self.file.truncate(0)
            self.file.truncate(self.unit.size)
            for offset, size in self.unit.extents:
                if size:
                    os.posix_fallocate(self.file.fileno(), offset, size)

    def publish(self) -> None:
        """Give the unit its name, durably."""
        self._claim.publish()

    def close(self) -> None:
        """End it. A unit that was not published is gone."""
        self._claim.close()


def is_being_fetched(path: Path) -> bool:
    """Whether a live process is fetching the unit ``path``."""
    return is_locked(tmp_path(path))
