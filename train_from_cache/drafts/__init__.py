"""The built-in drafts by name. Importing this module loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from dspark.schemas.errors import InputError

if TYPE_CHECKING:
    from dspark.train_from_cache.drafts.base import Draft

_HOMES = {
    "dspark": ("dspark.train_from_cache.drafts.dspark", "DSparkDraft"),
    "msd": ("dspark.train_from_cache.drafts.msd", "MSDDraft"),
}

ARCHITECTURES = tuple(_HOMES)


def draft_class(arch: str) -> "type[Draft]":
    """The class of the draft that ``--arch`` names.

    Raises:
        InputError: there is none of that name; the message lists those there are.
    """
    if arch not in _HOMES:
        raise InputError(f"--arch {arch}: no such draft; choose from {', '.join(ARCHITECTURES)}")
    module, name = _HOMES[arch]
    cls: type[Draft] = getattr(import_module(module), name)
    return cls
