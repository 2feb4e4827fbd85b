"""The plan of an extension: the cache's own, with other fields."""

from dataclasses import replace

from dspark.capture.conversations import Conversations
from dspark.capture.extension.request import ExtensionRequest
from dspark.capture.plan import CapturePlan, plan_capture
from dspark.capture.targets.target import Target
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.extension import AROUND
from dspark.schemas.manifest import identity_differences
from dspark.schemas.shard_layout import ShardLayout

_ITS_OWN = {"layers", "logits", *AROUND}


def plan_extension(
    request: ExtensionRequest, target: Target, conversations: Conversations
) -> CapturePlan:
    """Probe the target, and compare all that matters with the identity of the cache.

    Returns:
        The plan of the extension's files: its manifest is that of the part.

    Raises:
        IncompatibleCacheError: a setting, the target or the data are not those of the cache.
        InputError: the target cannot be captured so.
    """
    cache = request.manifest
    settings = request.settings
    plan = plan_capture(
        replace(settings, layers=request.layers, logits=request.logits or cache.logits),
        target,
        conversations,
    )
    now = plan.manifest.identity
    there, here = (
        {k: v for k, v in identity.items() if k not in _ITS_OWN}
        for identity in (cache.identity, now)
    )
    if different := identity_differences(there, here):
        raise IncompatibleCacheError(
            f"--extend: the cache in {settings.out} was captured otherwise "
            f"({'; '.join(different)}); leave these options out, give the target and data of the "
            "capture, or capture anew into another --out"
        )
    extended = cache.with_extension(request.number, request.extension(now))
    part = extended.parts[request.number]
    return replace(
        plan,
        manifest=part,
        layout=ShardLayout(part.fields, part.rows_per_shard),
        part=request.number,
    )
