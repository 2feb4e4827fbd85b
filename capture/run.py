"""Stage 1 from end to end."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.capture.conversations import Conversations, open_conversations
from dspark.capture.disk_room import check_room, evenly_spaced, may_not_fit
from dspark.capture.finish import committed, missing_shards
from dspark.capture.plan import CapturePlan, plan_capture
from dspark.capture.progress import CaptureProgress
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.settings import CaptureSettings
from dspark.capture.shard import capture_shard
from dspark.capture.skipped import SkippedKind, skipped_table
from dspark.capture.targets.target import Target, load_target
from dspark.capture.targets.target_files import write_target_files
from dspark.schemas.errors import IncompatibleCacheError, InputError, TooManySkippedError
from dspark.schemas.manifest import (
    Manifest,
    identity_differences,
    read_manifest,
    write_manifest,
)
from dspark.schemas.paths import CachePaths, head_path, manifest_path

_ESTIMATED_ROWS = 32


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did.

    Attributes:
        root: the cache.
        manifest: of the finished cache.
        shards_written: by this call; 0 if the cache was complete already.
        bytes_written: by this call.
        skipped: rows that could not be captured, by reason.
    """

    root: Path
    manifest: Manifest
    shards_written: int
    bytes_written: int
    skipped: tuple[SkippedKind, ...]


def capture(
    shards: int,
    *,
    target: str | None = None,
    data: str | None = None,
    out: str = "cache",
    max_length: int | None = None,
    layers: str = "auto",
    logits: str = "auto",
    dtype: str = "bf16",
    batch_tokens: int = 16384,
    limit: int | None = None,
    device: str = "auto",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    device_map: str | None = None,
    image_root: str | None = None,
    allow_download: bool = False,
    mask_reasoning: bool = False,
    fake_image: str = "auto",
    overlong: str = "skip",
    on_bad_row: str = "skip",
    max_skipped: float = 0.1,
    progress: bool = False,
) -> CaptureReport:
    """Run a frozen VLM once over conversations and write a cache; what ``dspark capture`` does.

    A capture that was stopped continues with its missing shards when called again.

    Args:
        shards: N, files to split the dataset into.
        target: folder or Hugging Face id of the model; the bundled one by default.
        data: file, folder or glob of conversations, or a dataset of Hugging Face (see
            ``docs/data.md``); the bundled file by default.
        out: cache directory.
        max_length: T. 2048, or the target's limit if lower, by default.
        layers: ``auto`` or comma-separated decoder layers, by their output.
        logits: ``auto``, ``full``, ``topk:k`` or ``head``.
        dtype: ``bf16``, ``fp16`` or ``fp32`` of the stored floats.
        batch_tokens: most tokens of a batch, padding included.
        limit: capture only the first rows.
        device: ``auto``, ``cpu`` or ``cuda``.
        revision: of a Hugging Face repository.
        attn_implementation: of transformers.
        trust_remote_code: run code that the repository brings along.
        chat_template: file with a chat template to use instead of the processor's.
        device_map: ``auto`` spreads the model over all devices.
        image_root: folder that picture paths are relative to; the data file's own by default.
        allow_download: fetch pictures from http(s) addresses.
        mask_reasoning: leave ``<think>…</think>`` of assistant turns unsupervised.
        fake_image: ``auto``, ``always`` or ``never`` (see ``settings.RowOptions``).
        overlong: ``skip`` or ``truncate`` rows of more than ``max_length`` tokens.
        on_bad_row: ``skip`` or ``error``.
        max_skipped: share of skipped rows above which the finished capture is an error.
        progress: show a progress bar on stderr.

    Raises:
        InputError: an option, the target, the data or the output directory is not usable.
        TooManySkippedError: the cache is finished, and more rows than ``max_skipped`` were skipped.
    """
    settings = CaptureSettings.check(
        shards=shards,
        target=target,
        data=data,
        out=out,
        max_length=max_length,
        layers=layers,
        logits=logits,
        dtype=dtype,
        batch_tokens=batch_tokens,
        limit=limit,
        device=device,
        revision=revision,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        chat_template=chat_template,
        device_map=device_map,
        image_root=image_root,
        allow_download=allow_download,
        mask_reasoning=mask_reasoning,
        fake_image=fake_image,
        overlong=overlong,
        on_bad_row=on_bad_row,
        max_skipped=max_skipped,
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "capture runs in one process so far; start it without torchrun, or with one process"
        )
    root = settings.out
    _check_out_is_ours(root)
    conversations = open_conversations(settings.data, settings.rows)
    loaded = load_target(settings.target, settings.device, settings.target_options)
    plan = plan_capture(settings, loaded, conversations)
    paths = CachePaths(root, shards)
    existing = _existing_manifest(root, plan)
    missing = missing_shards(plan.manifest, paths)
    has_target = existing is not None and head_path(root).is_file()
    if existing is not None and existing.complete and has_target and not missing:
        return _report(settings, existing, committed(existing, paths).skipped, 0, 0)

    _check_room(settings, plan, loaded, conversations, missing)
    for folder in (paths.shard(0).parent, paths.index(0).parent):
        _make_dir(folder)
    if not has_target:
        write_target_files(root, loaded)
    write_manifest(root, plan.manifest)
    done = plan.manifest.num_samples - sum(len(plan.manifest.rows_of(s)) for s in missing)
    with CaptureProgress(plan.manifest.num_samples, done, show=progress) as bar:
        for shard in missing:
            capture_shard(shard, plan, paths, loaded, conversations, bar)
    held = committed(plan.manifest, paths)
    manifest = plan.manifest.finished(held.counts, held.head_error)
    if manifest.counts.ok == 0:
        reasons = ", ".join(f"{n} x {r}" for r, n in manifest.counts.skipped.items())
        raise InputError(f"--data {settings.data}: every row was skipped ({reasons})")
    write_manifest(root, manifest)
    return _report(settings, manifest, held.skipped, len(missing), bar.bytes_written)


def _report(
    settings: CaptureSettings,
    manifest: Manifest,
    kinds: tuple[SkippedKind, ...],
    shards: int,
    size: int,
) -> CaptureReport:
    """The report of a finished capture, or an error if it skipped too many rows."""
    count = sum(kind.count for kind in kinds)
    if count > settings.rows.max_skipped * manifest.num_samples:
        raise TooManySkippedError(
            f"{count:,} of {manifest.num_samples:,} rows were skipped, more than --max-skipped "
            f"{settings.rows.max_skipped:g} allows; {settings.out} is complete without them: mend "
            "the rows and capture again, or give a larger --max-skipped to accept it\n"
            + skipped_table(kinds)
        )
    return CaptureReport(settings.out, manifest, shards, size, kinds)


def _check_room(
    settings: CaptureSettings,
    plan: CapturePlan,
    target: Target,
    conversations: Conversations,
    missing: list[int],
) -> None:
    """Estimate what the missing shards take from a few of their rows, if that may be too much."""
    manifest = plan.manifest
    rows = [manifest.rows_of(shard) for shard in missing]
    count = sum(map(len, rows))
    if not may_not_fit(manifest, count, settings.out):
        return
    options = replace(settings.rows, on_bad_row="skip")
    encoded = [
        encode_row(row, conversations, target, manifest.max_length, options)
        for row in evenly_spaced(rows, _ESTIMATED_ROWS)
    ]
    lengths = [len(row) if isinstance(row, EncodedRow) else 0 for row in encoded]
    check_room(manifest, count, lengths, settings.out)


def _check_out_is_ours(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise InputError(f"--out {root}: a file of that name exists; choose another directory")
    above = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"--out {root}: cannot be written, because {above} cannot")
    ours = {"manifest.json", "manifest.json.tmp", "shards", "index", "target", "target.tmp"}
    if root.is_dir() and (other := {p.name for p in root.iterdir()} - ours):
        raise InputError(
            f"--out {root}: the directory holds something else ({sorted(other)[0]}); choose an "
            "empty or new one"
        )


def _existing_manifest(root: Path, plan: CapturePlan) -> Manifest | None:
    if not manifest_path(root).exists():
        return None
    existing = read_manifest(root)
    if different := identity_differences(existing.identity, plan.manifest.identity):
        raise IncompatibleCacheError(
            f"--out {root}: it holds a capture with other settings ({'; '.join(different)}); use "
            "those settings to continue it, or choose another --out"
        )
    return existing


def _make_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder.parent}: {error.strerror}") from None
