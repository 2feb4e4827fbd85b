"""The numbers that torchrun gives its workers."""

import os

from dspark.schemas.errors import InputError


def torchrun_number(name: str, default: int) -> int:
    """The number in an environment variable; ``default`` where it is not set, or empty.

    Raises:
        InputError: it is no number, or a negative one.
    """
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise InputError(
            f"{name} is {text!r} in the environment, where torchrun sets a number; unset it, or "
            "start the workers with torchrun"
        )
    return int(text)


def world_size() -> int:
    """Workers of this job; 1 where torchrun did not start it.

    Raises:
        InputError: ``WORLD_SIZE`` is no number, or 0.
    """
    if (size := torchrun_number("WORLD_SIZE", 1)) < 1:
        raise InputError("WORLD_SIZE is 0 in the environment; unset it")
    return size
