"""What a capture will write, known before the first row is read: fields, layout, identity."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from dspark.capture.conversations import Conversations
from dspark.capture.rendering.fake_image import needs_fake_image
from dspark.capture.settings import CaptureSettings, RowOptions
from dspark.capture.stored import TargetSizes, stored, stored_layers
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.picture_entry import check_embeds
from dspark.capture.targets.probe import probe_target
from dspark.capture.targets.target import Target
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.shard_format import ShardFormat
from dspark.schemas.shard_layout import ShardLayout

_DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True)
class CapturePlan:
    """Attributes:
    manifest: of the unfinished cache.
    layout: of each shard.
    options: how rows become tokens.
    fake_image: whether text-only rows get a fake picture.
    part: of the cache that is written: 0, or the number of an extension, whose ``manifest`` is then
        that of its files alone (see ``Manifest.parts``).
    """

    manifest: Manifest
    layout: ShardLayout
    options: RowOptions
    fake_image: bool
    part: int = 0


def plan_capture(
    settings: CaptureSettings, target: Target, conversations: Conversations
) -> CapturePlan:
    """Probe the target and lay out the cache.

    Raises:
        InputError: the options do not fit the target or the data, or the target cannot be captured.
    """
    samples = min(len(conversations), settings.limit or len(conversations))
    if samples == 0:
        raise InputError(f"--data {settings.data}: it has no rows")
    if settings.shards > samples:
        raise InputError(f"--shards {settings.shards}: more than the {samples} rows to capture")
    rows_per_shard = -(-samples // settings.shards)
    max_length = _max_length(settings, target)
    layers = stored_layers(settings, target.num_layers)
    probe = probe_target(target, layers, torch_dtype(FLOAT_CODES[settings.dtype]))
    sizes = TargetSizes(target.num_layers, probe.hidden_size, probe.vocab_size, probe.position_rows)
    check_embeds(settings.embeds, probe.observed)
    kept = stored(settings, sizes, max_length)
    if kept.logits == "head":
        prove_head(target, probe.features)
    layout = ShardLayout(kept.fields, rows_per_shard)
    fake_image = needs_fake_image(settings.rows.fake_image, target.processor)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    identity: dict[str, Any] = {
        **target_identity(target),
        "data": conversations.fingerprint(),
        "num_samples": samples,
        "shards": settings.shards,
        "max_length": max_length,
        "dtype": settings.dtype,
        "embeds": settings.embeds,
        "layers": list(kept.layers),
        "logits": kept.logits,
        "batch_tokens": settings.batch_tokens,
        "image_root": _text(settings.rows.image_root),
        "allow_download": settings.rows.allow_download,
        "mask_reasoning": settings.rows.mask_reasoning,
        "overlong": settings.rows.overlong,
        "fake_image": fake_image,
        "tensor_parallel": settings.tp or 1,
        "device": settings.device.type,
        **versions,
    }
    manifest = Manifest(
        identity=identity,
        target=target.facts(probe.hidden_size, probe.vocab_size, probe.observed),
        data=str(settings.data),
        num_samples=samples,
        rows_per_shard=rows_per_shard,
        num_shards=settings.shards,
        max_length=max_length,
        dtype=settings.dtype,
        fields=kept.fields,
        layers=kept.layers,
        logits=kept.logits,
        versions=versions,
        shard_bytes=layout.file_size,
        shard_format=_shard_format(settings),
    )
    return CapturePlan(manifest, layout, settings.rows, fake_image)


def target_identity(target: Target) -> dict[str, Any]:
    """The part of a cache's identity that is the target's."""
    return {
        "target": target.revision or target.fingerprint,
        "target.config": target.config_hash(),
        "target.processor": target.processor_hash(),
        "target.chat_template": target.chat_template_hash(),
        "target.dtype": str(target.model.dtype).removeprefix("torch."),
        "target.attention": target.model.config._attn_implementation,
    }


def _shard_format(settings: CaptureSettings) -> ShardFormat:
    """The form that is asked for; a capture that goes on takes the codec that is there."""
    if not settings.zarr:
        return ShardFormat()
    if not settings.overwrite:
        with suppress(IncompatibleCacheError):  # ``prepare`` tells it
            if (there := read_manifest(settings.out).shard_format).is_zarr:
                return there
    return ShardFormat.zarr()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _max_length(settings: CaptureSettings, target: Target) -> int:
    limit = getattr(target.text_config, "max_position_embeddings", None)
    if settings.max_length is None:
        return min(_DEFAULT_MAX_LENGTH, limit or _DEFAULT_MAX_LENGTH)
    if limit is not None and settings.max_length > limit:
        raise InputError(
            f"--max-length {settings.max_length}: the target reads at most {limit} tokens"
        )
    return settings.max_length
