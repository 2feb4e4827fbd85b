"""The errors that a user can mend."""

from pathlib import Path
from signal import Signals

from dspark.schemas.disk_errors import how_to_read


def one_line(text: str) -> str:
    """A message that may quote a library's several lines, as one."""
    return " ".join(line.strip() for line in text.split("\n") if line.strip())


class InputError(Exception):
    """Wrong input. The message is one sentence that names the file, row or option and the way out.

    The command line prints it on stderr and exits with 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class IncompatibleCacheError(InputError):
    """A cache that cannot be used as asked: unfinished, another identity, or a field is missing."""


class UnreadableError(IncompatibleCacheError):
    """A file of a cache that the system does not let be read, so it may be sound.

    Attributes:
        problem: the same without the file's name and the way out.
        way_out: what makes it readable.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        self.problem = f"cannot be read ({error.strerror})"
        self.way_out = how_to_read(error)
        super().__init__(f"{path}: {self.problem}, so it may be sound; {self.way_out}")


class DamagedError(Exception):
    """A stored file is not what was written, found while its bytes are looked at.

    Who reads for a user tells it with the way out.

    Attributes:
        path: of the file.
        problem: what is wrong with it, in words.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class OtherVersionError(IncompatibleCacheError):
    """A cache of a format version that this dspark does not know. Nothing can be said of it."""


class TooManySkippedError(Exception):
    """A capture that is finished but skipped more rows than it was allowed to.

    The message names the limit and lists the reasons. The command line exits with 1.
    """


class FollowerError(Exception):
    """A failure that another worker of the job has already told. The command line is silent."""


class StoppedError(BaseException):
    """SIGINT or SIGTERM: stop now; what is committed stays.

    Attributes:
        exit_code: 130 or 143, as shells give.
    """

    def __init__(self, signal_number: int, where: str = "") -> None:
        super().__init__(" ".join(["stopped by", Signals(signal_number).name, where]).strip())
        self.exit_code = 128 + signal_number
