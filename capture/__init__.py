"""Stage 1: run a frozen vision-language target once over conversations and write a cache.

``dspark.capture(shards=…)`` runs it; the collate functions and the live MSD target are here too.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.capture.rendering.collate import (
        build_dspark_vlm_dataloader as build_dspark_vlm_dataloader,
    )
    from dspark.capture.rendering.collate import dspark_vlm_collate_fn as dspark_vlm_collate_fn
    from dspark.capture.run import capture as capture
    from dspark.capture.targets.msd_target import HFMSDTargetModel as HFMSDTargetModel
    from dspark.capture.targets.msd_target import MSDTargetBatch as MSDTargetBatch

_HOMES = {
    "build_dspark_vlm_dataloader": "dspark.capture.rendering.collate",
    "dspark_vlm_collate_fn": "dspark.capture.rendering.collate",
    "HFMSDTargetModel": "dspark.capture.targets.msd_target",
    "MSDTargetBatch": "dspark.capture.targets.msd_target",
}

__all__ = [
    "HFMSDTargetModel",
    "MSDTargetBatch",
    "build_dspark_vlm_dataloader",
    "dspark_vlm_collate_fn",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dspark.capture' has no attribute {name!r}")


class _CallableModule(ModuleType):
    """``dspark.capture`` is this package and, called, the function ``capture.run.capture``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("dspark.capture.run").capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
