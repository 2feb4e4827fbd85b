"""dspark: capture a frozen vision-language target once, train any draft from the cache.

Public Python API::

    dspark.capture(shards=4)                      # stage 1, what `dspark capture` does
    dspark.train_draft(cache="cache", arch="msd") # stage 2, what `dspark train-draft` does
    dspark.evaluate_drafts("cache", ["drafts/msd"])  # what `dspark evaluate` does
    cache = dspark.open_cache("cache")            # cache[i] -> dict of tensors for dataset row i
    dspark.verify_cache("cache", deep=True)       # what `dspark verify` does
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from dspark.capture.run import capture as capture
    from dspark.schemas.errors import InputError as InputError
    from dspark.train_from_cache.cache import Cache as Cache
    from dspark.train_from_cache.cache import open_cache as open_cache
    from dspark.train_from_cache.compare import evaluate_drafts as evaluate_drafts
    from dspark.train_from_cache.train import train_draft as train_draft
    from dspark.train_from_cache.train import train_drafts as train_drafts
    from dspark.verify.run import verify_cache as verify_cache

__all__ = [
    "Cache",
    "__version__",
    "capture",
    "evaluate_drafts",
    "InputError",
    "open_cache",
    "train_draft",
    "train_drafts",
    "verify_cache",
]

# `capture` is both a package and a function; capture/__init__.py makes the package callable.
_HOMES = {
    "Cache": "dspark.train_from_cache.cache",
    "evaluate_drafts": "dspark.train_from_cache.compare",
    "InputError": "dspark.schemas.errors",
    "open_cache": "dspark.train_from_cache.cache",
    "train_draft": "dspark.train_from_cache.train",
    "train_drafts": "dspark.train_from_cache.train",
    "verify_cache": "dspark.verify.run",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "capture":
        return import_module("dspark.capture")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dspark")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return list(__all__)
