"""What torch.compile fails with, as a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from dspark.schemas.errors import InputError


@contextmanager
def compiling(compiles: bool) -> Iterator[None]:
    """Around what computes with a draft that ``--compile`` has compiled, if it has.

    Raises:
        InputError: it cannot be compiled here, for want of a C++ compiler for example.
    """
    try:
        yield
    except RuntimeError as error:
        if not compiles:
            raise
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, TorchDynamoException):
            raise
        said = " ".join(line.strip() for line in str(error).splitlines()[:2]).strip()
        raise InputError(
            f"--compile: torch cannot compile the draft here ({said}); it wants a C++ compiler "
            "that works, and a path without blanks to its own folder; or leave --compile out"
        ) from error
