"""Which shards are committed, and what they hold together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dspark.capture.skipped import SkippedKind, counts_by_kind, skipped_kinds
from dspark.schemas.columns import NAMES, columns_are_sound, write_columns
from dspark.schemas.index import OK, index_identity, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.paths import CachePaths, columns_path, first_indexes
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
    totals = _Totals()
    for _ in _added(manifest, paths, totals):
        pass
    return totals.committed()


@dataclass(frozen=True)
class Finished:
    """A capture, all of whose shards are committed.

    Attributes:
        manifest: of the complete cache; not written yet.
        skipped: the rows that were skipped, by reason.
        rewritten: files of the cache that were written.
    """

    manifest: Manifest
    skipped: tuple[SkippedKind, ...]
    rewritten: tuple[str, ...]


def finish(manifest: Manifest, paths: CachePaths) -> Finished:
    """Add up the indexes of all shards, each read once, and write their columns on the way.

    Args:
        manifest: as it is there. Columns that are as it says are left alone.
        paths: of the first files.
    """
    columns = manifest.columns
    rewritten: tuple[str, ...] = ()
    totals = _Totals()
    indexes = _added(manifest, paths, totals)
    if columns is not None and columns_are_sound(paths.root, manifest):
        for _ in indexes:
            pass
    else:
        columns = write_columns(paths.root, manifest.num_samples, indexes)
        rewritten = (columns_path(paths.root).relative_to(paths.root).as_posix(),)
    held = totals.committed()
    finished = manifest.finished(held.counts, held.head_error, columns)
    return Finished(finished, held.skipped, rewritten)


def _added(manifest: Manifest, paths: CachePaths, totals: "_Totals") -> Iterator[pa.Table]:
    """The indexes of all shards, each added to ``totals`` before it comes."""
    for shard in range(manifest.num_shards):
        table, facts = read_index(paths, manifest, shard)
        totals.add(table, facts)
        yield table


class _Totals:
    """The sums of indexes."""

    def __init__(self) -> None:
        self._ok = 0
        self._sums = dict.fromkeys(NAMES, 0)
        self._skipped: list[tuple[int, str]] = []
        self._head_error: float | None = None

    def add(self, table: pa.Table, facts: Mapping[str, Any]) -> None:
        """Add those of the next shard."""
        bad = table.filter(pc.not_equal(table["status"], OK))
        self._skipped += zip(bad["sample"].to_pylist(), bad["reason"].to_pylist(), strict=True)
        self._ok += len(table) - len(bad)
        for name in NAMES:
            self._sums[name] += pc.sum(table[name]).as_py() or 0
        if (error := facts["head_error"]) is not None:
            self._head_error = max(error, self._head_error or 0.0)

    def committed(self) -> Committed:
        kinds = skipped_kinds(self._skipped)
        tokens, image_tokens, loss_tokens = self._sums.values()
        counts = Counts(self._ok, counts_by_kind(kinds), tokens, image_tokens, loss_tokens)
        return Committed(counts, self._head_error, kinds)
