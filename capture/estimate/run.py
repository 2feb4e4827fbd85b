"""``dspark plan`` from end to end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dspark.capture.conversations import Conversations, open_conversations
from dspark.capture.disk_room import free_bytes, keeps_holes
from dspark.capture.estimate.alternatives import Alternative, alternatives, served_drafts
from dspark.capture.estimate.room import Room
from dspark.capture.estimate.rows import RowEstimate, estimate_rows, stored_rows
from dspark.capture.estimate.sizes import ShardSizes, shard_sizes
from dspark.capture.estimate.speed import Speed, measure_speed
from dspark.capture.extension.plan import plan_extension
from dspark.capture.extension.prepare import check_unfinished
from dspark.capture.extension.request import extension_request
from dspark.capture.finish import missing_shards
from dspark.capture.options import CaptureOptions
from dspark.capture.plan import CapturePlan, plan_capture
from dspark.capture.prepare import check_out, existing_manifest
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.settings import CaptureSettings
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths, head_path
from dspark.schemas.torchrun import world_size


@dataclass(frozen=True)
class CaptureEstimate:
    """Attributes:
    manifest: of the cache that would be written.
    layout: what the conversations were recognised as.
    rows: how many can be captured, and their tokens.
    sizes: bytes of all shards.
    head_bytes: of the target's embeddings and head, stored once.
    served: draft architectures whose layers are stored.
    alternatives: other choices.
    room: what is still to be captured, and the disk.
    obstacle: why a capture into ``--out`` would be refused, or an empty string.
    max_skipped: share of skipped rows above which the finished capture is an error.
    speed: measured, or None.
    part: 0, or the number of the extension that would be added: ``manifest`` is then that of its
        files alone.
    """

    manifest: Manifest
    layout: str
    rows: RowEstimate
    sizes: ShardSizes
    head_bytes: int
    served: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    room: Room
    obstacle: str
    max_skipped: float
    speed: Speed | None
    part: int = 0


def estimate_capture(
    options: CaptureOptions, *, exact: bool = False, measure: bool = False
) -> CaptureEstimate | None:
    """What a capture with these options would take; writes nothing.

    Args:
        options: of the capture.
        exact: tokenise every row instead of a sample.
        measure: also run a few batches for the speed.

    Returns:
        The estimate; None where the cache holds all that ``--extend`` asks for.

    Raises:
        InputError: the capture would be refused.
    """
    if world_size() > 1:
        raise InputError("plan runs in one process; start it without torchrun")
    if options.extend:
        return _estimate_extension(options, measure=measure)
    settings = CaptureSettings.check(options)
    conversations = open_conversations(settings.data, settings.rows)
    target = load_target(settings.target, settings.device, settings.target_options)
    plan = plan_capture(settings, target, conversations)
    manifest = plan.manifest
    encode = _encode(plan, target, conversations)
    rows = estimate_rows(manifest.num_samples, encode, exact=exact)
    sizes = shard_sizes(
        manifest.fields,
        rows,
        num_shards=manifest.num_shards,
        rows_per_shard=manifest.rows_per_shard,
    )
    head_bytes = sum(tensor.nbytes for tensor in target.head_tensors().values())
    return CaptureEstimate(
        manifest=manifest,
        layout=conversations.layout,
        rows=rows,
        sizes=sizes,
        head_bytes=head_bytes,
        served=served_drafts(manifest),
        alternatives=alternatives(settings, manifest, rows, target),
        room=_room(settings, plan, rows, sizes, head_bytes),
        obstacle=_obstacle(settings, plan),
        max_skipped=settings.rows.max_skipped,
        speed=measure_speed(plan, target, conversations, encode) if measure else None,
    )


def _estimate_extension(options: CaptureOptions, *, measure: bool) -> CaptureEstimate | None:
    """The same of ``--extend``; the rows are known."""
    request = extension_request(options)
    settings = request.settings
    if request.adds_nothing:
        return None
    conversations = open_conversations(settings.data, settings.rows)
    target = load_target(settings.target, settings.device, settings.target_options)
    plan = plan_extension(request, target, conversations)
    manifest = plan.manifest
    rows = stored_rows(request.manifest.parts[0], settings.out)
    sizes = shard_sizes(
        manifest.fields,
        rows,
        num_shards=manifest.num_shards,
        rows_per_shard=manifest.rows_per_shard,
    )
    obstacle = ""
    try:
        check_out(settings.out)
        if not settings.overwrite:
            check_unfinished(request, request.manifest, request.extension(manifest.identity))
    except InputError as error:
        obstacle = str(error)
    encode = _encode(plan, target, conversations)
    layers = tuple(sorted({*request.manifest.all_layers, *manifest.layers}))
    return CaptureEstimate(
        manifest=manifest,
        layout=conversations.layout,
        rows=rows,
        sizes=sizes,
        head_bytes=0,
        served=served_drafts(replace(manifest, layers=layers)),
        alternatives=(),
        room=_room(settings, plan, rows, sizes, head_bytes=0),
        obstacle=obstacle,
        max_skipped=1.0,
        speed=measure_speed(plan, target, conversations, encode) if measure else None,
        part=plan.part,
    )


def _encode(
    plan: CapturePlan, target: Target, conversations: Conversations
) -> Callable[[int], EncodedRow | SkippedRow]:
    return partial(
        encode_row,
        conversations=conversations,
        target=target,
        max_length=plan.manifest.max_length,
        options=plan.options,
    )


def _obstacle(settings: CaptureSettings, plan: CapturePlan) -> str:
    try:
        check_out(settings.out)
        if not settings.overwrite:
            existing_manifest(settings.out, plan)
    except InputError as error:
        return str(error)
    return ""


def _room(
    settings: CaptureSettings,
    plan: CapturePlan,
    rows: RowEstimate,
    sizes: ShardSizes,
    head_bytes: int,
) -> Room:
    """What the shards take that this capture would still write, by their share of the rows."""
    manifest = plan.manifest
    shards: Sequence[int] = range(manifest.num_shards)
    if not settings.overwrite:
        paths = CachePaths(settings.out, manifest.num_shards, plan.part)
        shards = missing_shards(manifest, paths)
    if settings.only is not None:
        shards = sorted({*shards} & {*settings.only})
    share = sum(len(manifest.rows_of(shard)) for shard in shards) / manifest.num_samples
    head = 0 if head_path(settings.out).is_file() and not settings.overwrite else head_bytes
    disk_bytes = round(share * sizes.disk_bytes) + head
    zarr = manifest.shard_format.is_zarr  # which has no padding to begin with
    return Room(
        out=settings.out,
        free_bytes=free_bytes(settings.out),
        keeps_holes=zarr or keeps_holes(settings.out),
        shards=len(shards),
        disk_bytes=disk_bytes,
        file_bytes=disk_bytes if zarr else len(shards) * manifest.shard_bytes + head,
        relative_error=rows.relative_error,
    )
