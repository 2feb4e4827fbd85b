"""The errors that a user can mend."""


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


class TooManySkippedError(Exception):
    """A capture that is finished but skipped more rows than it was allowed to.

    The message names the limit and lists the reasons. The command line exits with 1.
    """
