"""What ``dspark plan`` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dspark.reports.text import plural, printable_lines, size, table

if TYPE_CHECKING:
    from dspark.capture.estimate.run import CaptureEstimate
    from dspark.schemas.manifest import Manifest

WORKERS = (1, 8, 64)
_LESS = "store less (see the table, or --limit, --max-length) or choose another disk"


def plan(estimate: "CaptureEstimate") -> str:
    """An estimate for a reader."""
    parts = [_rows(estimate), _fields(estimate)]
    if estimate.alternatives:
        parts.append(_alternatives(estimate))
    if estimate.speed is not None:
        parts.append(_speed(estimate))
    return "\n\n".join([*parts, _room(estimate) + "\nNothing was written."])


def document(estimate: "CaptureEstimate") -> dict[str, Any]:
    """An estimate as JSON-ready values; sizes in bytes, times in seconds."""
    from dspark.capture.estimate.speed import busiest_worker_share

    manifest, rows, room, speed = estimate.manifest, estimate.rows, estimate.room, estimate.speed
    measured = None
    if speed is not None:
        alone = speed.seconds(rows.rows, rows.counts.tokens)
        measured = {
            **asdict(speed),
            "tokens_per_second": rows.counts.tokens / alone,
            "written_bytes_per_second": estimate.sizes.real_bytes / alone,
            "capture_seconds": {
                str(n): alone * busiest_worker_share(manifest.num_shards, n) for n in WORKERS
            },
        }
    return {
        "data": manifest.data,
        "data_layout": estimate.layout,
        "rows": rows.rows,
        "rows_read": rows.read,
        "relative_error_95": rows.relative_error,
        "counts": asdict(rows.counts),
        "target": manifest.target.id,
        "dtype": manifest.dtype,
        "layers": list(manifest.layers),
        "logits": manifest.logits,
        "extends": bool(estimate.part),
        "drafts": list(estimate.served),
        "num_shards": manifest.num_shards,
        "rows_per_shard": manifest.rows_per_shard,
        "max_length": manifest.max_length,
        "shard_file_bytes": manifest.shard_bytes,
        "token_bytes_by_field": {f.name: f.token_bytes for f in manifest.fields},
        **asdict(estimate.sizes),
        "head_bytes": estimate.head_bytes,
        "alternatives": [
            {
                "options": other.options,
                "dtype": other.stored.dtype,
                "layers": list(other.stored.layers),
                "logits": other.stored.logits,
                **asdict(other.sizes),
                "refusal": other.refusal or None,
            }
            for other in estimate.alternatives
        ],
        "room": {**asdict(room), "out": str(room.out), "fit": room.fit.value},
        "obstacle": estimate.obstacle or None,
        "speed": measured,
    }


def nothing_to_add() -> dict[str, Any]:
    """The document of an extension that adds no field."""
    return {"extends": True, "token_bytes_by_field": {}}


def _rows(estimate: "CaptureEstimate") -> str:
    manifest, rows = estimate.manifest, estimate.rows
    counts = rows.counts
    sampled = rows.read < rows.rows
    about = "about " if sampled else ""

    def shown(count: int) -> str:
        return f"{int(float(f'{count:.3g}')) if sampled else count:,}"

    how = (
        f"estimated from {rows.read:,} of {rows.rows:,} rows: tokens and sizes are "
        f"± {100 * rows.relative_error:.1f} % at 95 % confidence (--exact reads all rows)"
        if sampled
        else f"counted in all {rows.rows:,} rows"
    )
    skipped = sum(counts.skipped.values())
    return "\n".join(
        [
            f"{manifest.data}: {estimate.layout}",
            how,
            f"{about}{shown(counts.ok)} rows to capture, "
            + (
                f"{about}{shown(skipped)} skipped:\n" + _skipped(estimate)
                if skipped
                else f"none of the {rows.read:,} read is skipped"
            ),
            f"{about}{shown(counts.tokens)} tokens: {shown(counts.image_tokens)} of pictures, "
            f"{shown(counts.loss_tokens)} supervised; {_lengths(estimate)}",
            (
                f"added to what is stored: layers {_layers(manifest.layers)} (by output), logits "
                f"{'none' if manifest.logits == 'head' else manifest.logits}; with those enough"
                if estimate.part
                else f"stored: {manifest.dtype}, layers {_layers(manifest.layers)} (by output), "
                f"logits {manifest.logits}{_left_out(manifest)}; enough"
            )
            + f" for the drafts {', '.join(estimate.served)}",
        ]
    )


def _left_out(manifest: "Manifest") -> str:
    names = ", ".join(field.name for field in manifest.fields if field.where is not None)
    return f", {names} of pictures alone" if names else ""


def _skipped(estimate: "CaptureEstimate") -> str:
    from dspark.capture.skipped import skipped_table

    lines = [printable_lines(skipped_table(estimate.rows.skipped))]
    if sum(estimate.rows.counts.skipped.values()) > estimate.max_skipped * estimate.rows.rows:
        lines.append(
            f"  more than --max-skipped {estimate.max_skipped:g} allows: the capture would finish "
            "and exit with 1"
        )
    return "\n".join(lines)


def _lengths(estimate: "CaptureEstimate") -> str:
    lengths = sorted(estimate.rows.lengths.items())
    count = sum(n for _, n in lengths)
    if not count:
        return "no row can be captured"
    mean = sum(length * n for length, n in lengths) / count
    return (
        f"a row has {mean:,.0f} on average, {lengths[-1][0]:,} at most, of --max-length "
        f"{estimate.manifest.max_length:,}"
    )


def _fields(estimate: "CaptureEstimate") -> str:
    manifest, sizes = estimate.manifest, estimate.sizes
    counts = estimate.rows.counts
    rows = manifest.num_shards * manifest.rows_per_shard
    lines = [
        (
            f.name,
            f.dtype,
            f"{f.token_bytes:,}",
            size(f.real_bytes(counts.tokens, counts.image_tokens)),
            size(f.row_bytes * rows),
        )
        for f in manifest.fields
    ]
    total = ("total", "", f"{sizes.token_bytes:,}", size(sizes.real_bytes), size(sizes.file_bytes))
    return "\n".join(
        [
            table([*lines, total], ("field", "type", "bytes/token", "real rows", "with padding")),
            "",
            f"{manifest.num_shards:,} shards of {manifest.rows_per_shard:,} rows x "
            f"{manifest.max_length:,} tokens, each {size(sizes.real_bytes / manifest.num_shards)} "
            f"of real rows on average and {size(manifest.shard_bytes)} with padding",
            _on_disk(estimate),
            *(
                [f"and once, for the target's embeddings and head: {size(estimate.head_bytes)}"]
                * (not estimate.part)
            ),
        ]
    )


def _on_disk(estimate: "CaptureEstimate") -> str:
    sizes = estimate.sizes
    if estimate.manifest.shard_format.is_zarr:
        return (
            f"on disk: at most about {size(sizes.disk_bytes)}, and less by what zarr compresses, "
            "which depends on the numbers; each worker also needs room for the shard that it is at"
        )
    return (
        f"on disk: {size(sizes.disk_bytes)}, in blocks of 4 KiB, where the file system keeps "
        f"holes (ext4, xfs, …), {size(sizes.file_bytes)} where it does not"
    )


def _alternatives(estimate: "CaptureEstimate") -> str:
    manifest = estimate.manifest
    now = ("as asked", manifest.dtype, manifest.layers, manifest.logits, estimate.sizes)
    others = [
        (a.options, a.stored.dtype, a.stored.layers, a.stored.logits, a.sizes)
        for a in estimate.alternatives
        if not a.refusal
    ]
    rows = [
        (
            *(options, dtype, _layers(layers), logits),
            *(f"{sizes.token_bytes:,}", size(sizes.real_bytes), size(sizes.file_bytes)),
            f"{sizes.token_bytes / estimate.sizes.token_bytes:.2f}",
        )
        for options, dtype, layers, logits, sizes in (now, *others)
    ]
    header = ("instead", "dtype", "layers", "logits", "bytes/token", "real rows", "padded", "ratio")
    refused = [
        f"{other.options} would be refused: {other.refusal}"
        for other in estimate.alternatives
        if other.refusal
    ]
    return "\n".join([table(rows, header), *refused])


def _speed(estimate: "CaptureEstimate") -> str:
    from dspark.capture.estimate.speed import busiest_worker_share

    speed, tokens = estimate.speed, estimate.rows.counts.tokens
    assert speed is not None
    shards = estimate.manifest.num_shards
    alone = speed.seconds(estimate.rows.rows, tokens)
    rows = [
        (
            workers,
            f"{-(-shards // workers):,} of {shards:,}",
            _duration(alone * busiest_worker_share(shards, workers)),
            f"{size(estimate.sizes.real_bytes / alone * min(workers, shards))}/s",
        )
        for workers in WORKERS
    ]
    return "\n".join(
        [
            f"measured on {speed.device}: {speed.rows / speed.row_seconds:,.0f} rows/s read and "
            f"tokenised ({speed.rows:,} rows), then {speed.tokens / speed.batch_seconds:,.0f} "
            f"tokens/s run ({speed.batches} batches of {speed.tokens:,} tokens in "
            f"{speed.batch_seconds:.1f} s); one after the other {tokens / alone:,.0f} tokens/s",
            table(rows, ("workers", "shards of the busiest", "capture takes", "written")),
            "without the time for writing, and if every worker has such a device to itself; the "
            "disk must take what is written at that rate",
        ]
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _room(estimate: "CaptureEstimate") -> str:
    from dspark.capture.estimate.room import Fit

    room, shards = estimate.room, estimate.manifest.num_shards
    if estimate.obstacle:
        return f"the capture would be refused: {estimate.obstacle}"
    if not room.shards:
        return f"--out {room.out}: nothing is left to capture there"
    left = (
        "" if room.shards == shards else f" for the {plural(room.shards, 'shard')} still to capture"
    )
    holes, padded, free = size(room.disk_bytes), size(room.file_bytes), size(room.free_bytes)
    if room.relative_error:
        holes += f" ± {100 * room.relative_error:.1f} %"
    if room.fit == Fit.FITS and estimate.manifest.shard_format.is_zarr:
        verdict = f"it fits: at most about {holes} needed{left}"
    elif room.fit == Fit.FITS:
        verdict = f"it fits: {holes} needed{left}, padding being holes that take no room; " + (
            f"with padding {padded}, which fits as well"
            if room.file_bytes <= room.free_bytes
            else f"a copy that fills them takes {padded}, which does not fit"
        )
    elif room.fit == Fit.UNSURE:
        verdict = f"it may not fit: {holes} needed{left}; --exact says it without the ±"
    elif room.keeps_holes:
        verdict = f"it does NOT fit: {holes} needed{left}; {_LESS}"
    else:
        verdict = (
            f"it does NOT fit: that file system keeps no holes, so padding takes room and {padded} "
            f"are needed{left}; {_LESS}, or one with ext4, xfs or the like"
        )
    return f"--out {room.out}: {free} free; {verdict}"


def _layers(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers)) or "none"
