"""The drafts by name: ``NAME.py`` in this folder holds the draft ``NAME``. Importing this module
loads no torch."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from dspark.schemas.errors import InputError

if TYPE_CHECKING:
    from dspark.train_from_cache.drafts.base import Draft


def architectures() -> tuple[str, ...]:
    """The names that ``--arch`` takes."""
    return tuple(sorted(file.name for file in iter_modules(__path__) if file.name != "base"))


ARCHITECTURES = architectures()


def draft_class(arch: str) -> "type[Draft]":
    """The class of the draft that ``--arch`` names.

    Raises:
        InputError: there is none of that name; the message lists those there are.
    """
    names = architectures()
    if arch not in names:
        raise InputError(f"--arch {arch}: no such draft; choose from {', '.join(names)}")
    home = f"{__name__}.{arch}"
    classes = vars(import_module(home)).values()
    (cls,) = (c for c in classes if getattr(c, "arch", None) == arch and c.__module__ == home)
    found: type[Draft] = cls
    return found
