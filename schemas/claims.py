"""Who may write a shard: one live process at a time, among any number on one file system.

A claim on a file is a lock on its temporary file, kept through the renaming until the claim ends.
So whoever wants to write it must find both names unlocked. Only the holder of a claim renames or
removes the temporary file.
"""

import os
import time
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark.schemas.durable import names, publish, tmp_path
from dspark.schemas.locks import is_at, is_locked, lock

_TRIES = 20
_PAUSE = 0.01
"""Seconds. A cleaner locks a leftover for less than that (see ``leftovers``)."""


class ClaimedError(Exception):
    """Another live process has claimed the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: another process is writing it")


class Claim:
    """The right to write ``final``, until ``close``.

    Attributes:
        file: open for writing under the temporary name, with whatever a dead process left in it.

    Raises:
        ClaimedError: another live process has it.
    """

    def __init__(self, final: Path) -> None:
        self._final = final
        self._published = False
        self.file = _claimed(final)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self) -> None:
        """Make the written file durable and give it its final name; the claim goes on."""
        with names(self._final):
            os.fsync(self.file.fileno())
        publish(self._final)
        self._published = True

    def close(self) -> None:
        """End the claim. What was not published is removed."""
        if self.file.closed:
            return
        try:
            if not self._published:
                tmp_path(self._final).unlink(missing_ok=True)
        finally:
            self.file.close()


def _claimed(final: Path) -> FileIO:
    tmp = tmp_path(final)
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        file = FileIO(os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        if lock(file.fileno()) is False or not is_at(file.fileno(), tmp):
            # Locked; or published or removed between the opening and the locking.
            file.close()
            continue
        if is_locked(final):  # published, and its writer has not ended the claim
            tmp.unlink()
            file.close()
            break
        return file
    raise ClaimedError(final)
