"""Which shards are committed, and the manifest that follows from them alone."""

from collections import Counter
from collections.abc import Iterator

import pyarrow.compute as pc

from dspark.capture.bad_row import kind_of
from dspark.schemas.index import OK, index_identity, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.paths import CachePaths


def missing_shards(manifest: Manifest, paths: CachePaths) -> list[int]:
    """Shards without an index of this identity, or whose data is missing or cut."""
    return [
        shard
        for shard in range(manifest.num_shards)
        if not (
            index_identity(paths.index(shard)) == manifest.identity_hash
            and paths.shard(shard).is_file()
            and paths.shard(shard).stat().st_size == manifest.shard_bytes
        )
    ]


def skipped_rows(manifest: Manifest, paths: CachePaths) -> Iterator[tuple[int, str]]:
    """Dataset row and reason of every skipped row of the committed shards, in order."""
    for shard in range(manifest.num_shards):
        table, _ = read_index(paths.index(shard))
        bad = table.filter(pc.not_equal(table["status"], OK))
        yield from zip(bad["sample"].to_pylist(), bad["reason"].to_pylist(), strict=True)


def finished_manifest(manifest: Manifest, paths: CachePaths) -> Manifest:
    """The complete manifest, from the committed indexes."""
    ok = tokens = image_tokens = loss_tokens = 0
    skipped: Counter[str] = Counter()
    errors = []
    for shard in range(manifest.num_shards):
        table, metadata = read_index(paths.index(shard))
        statuses = table["status"].to_pylist()
        ok += statuses.count(OK)
        reasons = table["reason"].to_pylist()
        skipped.update(kind_of(r) for s, r in zip(statuses, reasons, strict=True) if s != OK)
        tokens += pc.sum(table["length"]).as_py() or 0
        image_tokens += pc.sum(table["image_tokens"]).as_py() or 0
        loss_tokens += pc.sum(table["loss_tokens"]).as_py() or 0
        errors.append(metadata["head_error"])
    counts = Counts(ok, dict(sorted(skipped.items())), tokens, image_tokens, loss_tokens)
    measured = [e for e in errors if e is not None]
    return manifest.finished(counts, max(measured, default=None))
