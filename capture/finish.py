"""Which shards are committed, and what they hold together."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from dspark.capture.skipped import SkippedKind, counts_by_kind, skipped_kinds
from dspark.schemas.index import OK, index_identity, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.paths import CachePaths, first_indexes
from dspark.schemas.stored_shard import is_committed


def missing_shards(manifest: Manifest, paths: CachePaths) -> list[int]:
    """Shards that are not committed."""
    return [s for s in range(manifest.num_shards) if not is_committed(manifest, paths, s)]


def other_captures(manifest: Manifest, root: Path) -> list[Path]:
    """Readable indexes in a cache that are not of this capture.

    Those of extensions have an identity of their own and follow the shards that they belong to.
    """
    paths = CachePaths(root, manifest.num_shards)
    ours = {paths.index(shard) for shard in range(manifest.num_shards)}
    return [
        path
        for path in first_indexes(root)
        if (identity := index_identity(path)) is not None
        and (path not in ours or identity != manifest.identity_hash)
    ]


@dataclass(frozen=True)
class Committed:
    """What the committed shards of a cache hold together.

    Attributes:
        counts: for the manifest.
        head_error: the largest of the shards', or None where logits are stored.
        skipped: the rows that were skipped, by reason.
    """

    counts: Counts
    head_error: float | None
    skipped: tuple[SkippedKind, ...]


def committed(manifest: Manifest, paths: CachePaths) -> Committed:
    """Add up the indexes of all shards, each read once."""
    ok = tokens = image_tokens = loss_tokens = 0
    skipped: list[tuple[int, str]] = []
    errors = []
    for shard in range(manifest.num_shards):
        table, metadata = read_index(paths, manifest, shard)
        bad = table.filter(pc.not_equal(table["status"], OK))
        skipped += zip(bad["sample"].to_pylist(), bad["reason"].to_pylist(), strict=True)
        ok += len(table) - len(bad)
        tokens += pc.sum(table["length"]).as_py() or 0
        image_tokens += pc.sum(table["image_tokens"]).as_py() or 0
        loss_tokens += pc.sum(table["loss_tokens"]).as_py() or 0
        errors.append(metadata["head_error"])
    kinds = skipped_kinds(skipped)
    counts = Counts(ok, counts_by_kind(kinds), tokens, image_tokens, loss_tokens)
    measured = [e for e in errors if e is not None]
    return Committed(counts, max(measured, default=None), kinds)
