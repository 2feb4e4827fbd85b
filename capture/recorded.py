"""The options of a capture, as the manifest of its cache records them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.capture.options import CaptureOptions
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest

_NEEDED = (
    *("data", "device", "batch_tokens", "fake_image", "image_root", "allow_download"),
    *("mask_reasoning", "overlong", "target.attention", "embeds"),
)


def recorded_options(root: Path, manifest: Manifest, given: CaptureOptions) -> CaptureOptions:
    """``given``, and for what it leaves open what the cache was captured with.

    Only options that matter to a stored number are filled in, and not which layers and logits are
    stored. The device is the captured one if this machine has it.

    Raises:
        InputError: the manifest does not say it all.
    """
    identity: dict[str, Any] = manifest.identity
    if lacking := [key for key in _NEEDED if key not in identity]:
        raise InputError(
            f"{root}: its manifest's identity has no {lacking[0]!r}, so nothing can be captured as "
            "it was"
        )
    same = given.target in (None, manifest.target.id)
    recorded = {
        "shards": manifest.num_shards,
        "target": manifest.target.id,
        "revision": manifest.target.revision or None if same else None,
        "data": manifest.data,
        "max_length": manifest.max_length,
        "dtype": manifest.dtype,
        "embeds": identity["embeds"],
        "limit": manifest.num_samples,
        "batch_tokens": identity["batch_tokens"],
        "attn_implementation": identity["target.attention"],
        "image_root": identity["image_root"],
        "overlong": identity["overlong"],
    }
    return replace(
        given,
        **{k: v for k, v in recorded.items() if getattr(given, k) is None},
        allow_download=given.allow_download or identity["allow_download"],
        mask_reasoning=given.mask_reasoning or identity["mask_reasoning"],
        fake_image=_fake_image(identity["fake_image"], given),
        device=_device(identity["device"], given),
    )


def _fake_image(captured: bool, given: CaptureOptions) -> Any:
    if given.fake_image != "auto":
        return given.fake_image
    return "always" if captured else "never"


def _device(captured: str, given: CaptureOptions) -> Any:
    if given.device != "auto":
        return given.device
    return "cuda" if captured == "cuda" and torch.cuda.is_available() else "cpu"
