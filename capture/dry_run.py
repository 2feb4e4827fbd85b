"""What a capture would write, without writing it."""

from dataclasses import dataclass

from dspark.capture.conversations import open_conversations
from dspark.capture.plan import plan_capture
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.settings import CaptureSettings
from dspark.capture.skipped import SkippedKind, counts_by_kind, skipped_kinds
from dspark.capture.targets.target import load_target
from dspark.schemas.manifest import Counts, Manifest


@dataclass(frozen=True)
class DryRun:
    """Attributes:
    manifest: of the cache that would be written, with its counts.
    bytes_per_token: of each field.
    real_bytes: of all real rows together.
    padded_bytes: of all shards, holes included.
    layout: what the conversations were recognised as.
    skipped: rows that cannot be captured, by reason.
    """

    manifest: Manifest
    bytes_per_token: dict[str, int]
    real_bytes: int
    padded_bytes: int
    layout: str
    skipped: tuple[SkippedKind, ...]


def dry_run(settings: CaptureSettings) -> DryRun:
    """Load the target, probe it, tokenise every row; write nothing."""
    conversations = open_conversations(settings.data, settings.rows)
    target = load_target(settings.target, settings.device, settings.target_options)
    plan = plan_capture(settings, target, conversations)
    manifest = plan.manifest
    ok = tokens = image_tokens = loss_tokens = 0
    skipped: list[tuple[int, str]] = []
    for sample in range(manifest.num_samples):
        row = encode_row(sample, conversations, target, manifest.max_length, settings.rows)
        if isinstance(row, EncodedRow):
            ok += 1
            tokens += len(row)
            image_tokens += int(row.image_mask.sum())
            loss_tokens += int(row.loss_mask.sum())
        else:
            skipped.append((sample, row.reason))
    kinds = skipped_kinds(skipped)
    counts = Counts(ok, counts_by_kind(kinds), tokens, image_tokens, loss_tokens)
    per_token = {f.name: f.token_bytes for f in manifest.fields}
    return DryRun(
        manifest=manifest.finished(counts, None),
        bytes_per_token=per_token,
        real_bytes=tokens * sum(per_token.values()),
        padded_bytes=manifest.num_shards * plan.layout.file_size,
        layout=conversations.layout,
        skipped=kinds,
    )
