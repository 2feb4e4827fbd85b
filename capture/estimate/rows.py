"""How many tokens a data set has: counted, or estimated from some of its rows."""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc
from tqdm import tqdm

from dspark.capture.finish import committed
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow
from dspark.capture.skipped import SkippedKind, counts_by_kind, skipped_kinds
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Counts, Manifest
from dspark.schemas.paths import CachePaths

SAMPLED_ROWS = 256
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class RowEstimate:
    """Attributes:
    rows: M, rows of the data set.
    read: rows that were tokenised; all, or a sample.
    counts: of all M rows, extrapolated from those that were read.
    relative_error: half the 95 % confidence interval of ``counts.tokens``, as a share of it; 0
        where every row was read.
    skipped: rows that cannot be captured, by reason; counts are extrapolated, row numbers real.
    lengths: of the rows that were read and can be captured: rows by their number of tokens.
    """

    rows: int
    read: int
    counts: Counts
    relative_error: float
    skipped: tuple[SkippedKind, ...]
    lengths: Mapping[int, int]

    def total(self, of_length: Callable[[int], int]) -> int:
        """The sum of ``of_length(tokens)`` over all M rows, extrapolated."""
        seen = sum(count * of_length(length) for length, count in self.lengths.items())
        return _extrapolated(seen, self.rows, self.read)


def sampled_rows(rows: int, seed: int = 0) -> list[int]:
    """At most ``SAMPLED_ROWS`` of ``rows`` rows: one out of each of equally long stretches.

    Which one is drawn, so that rows that repeat with some period do not bias the sample.
    """
    count = min(rows, SAMPLED_ROWS)
    draw = random.Random(seed)
    return [draw.randrange(i * rows // count, (i + 1) * rows // count) for i in range(count)]


def estimate_rows(
    rows: int, encode: Callable[[int], EncodedRow | SkippedRow], *, exact: bool
) -> RowEstimate:
    """Tokenise a sample of the rows, or each of them.

    Args:
        rows: M.
        encode: a dataset row, tokenised.
        exact: read all rows, with a progress bar on stderr.
    """
    chosen: Iterable[int] = sampled_rows(rows)
    if exact:
        seconds = 0.1 if sys.stderr.isatty() else 30
        chosen = tqdm(range(rows), desc="plan", unit="row", mininterval=seconds)
    lengths: Counter[int] = Counter()
    image_tokens = loss_tokens = 0
    skipped: list[tuple[int, str]] = []
    for sample in chosen:
        row = encode(sample)
        if isinstance(row, SkippedRow):
            skipped.append((sample, row.reason))
        else:
            lengths[len(row)] += 1
            image_tokens += row.image_tokens
            loss_tokens += row.loss_tokens
    return extrapolate(rows, lengths, image_tokens, loss_tokens, skipped)


def stored_rows(manifest: Manifest, root: Path) -> RowEstimate:
    """The rows of a finished cache, from its indexes.

    Args:
        manifest: of its first part.
        root: the cache.
    """
    paths = CachePaths(root, manifest.num_shards)
    lengths: Counter[int] = Counter()
    for shard in range(manifest.num_shards):
        table, _ = read_index(paths, manifest, shard)
        lengths.update(table.filter(pc.equal(table["status"], OK))["length"].to_pylist())
    return RowEstimate(
        rows=manifest.num_samples,
        read=manifest.num_samples,
        counts=manifest.counts,
        relative_error=0.0,
        skipped=committed(manifest, paths).skipped,
        lengths=lengths,
    )


def extrapolate(
    rows: int,
    lengths: Mapping[int, int],
    image_tokens: int,
    loss_tokens: int,
    skipped: list[tuple[int, str]],
) -> RowEstimate:
    """From what was read to all ``rows`` rows.

    Args:
        rows: M.
        lengths: rows that can be captured, by their number of tokens.
        image_tokens: of these rows.
        loss_tokens: of these rows.
        skipped: number and reason of the others, in row order.
    """
    read = sum(lengths.values()) + len(skipped)
    tokens = sum(length * count for length, count in lengths.items())
    kinds = tuple(
        replace(kind, count=_extrapolated(kind.count, rows, read))
        for kind in skipped_kinds(skipped)
    )
    return RowEstimate(
        rows=rows,
        read=read,
        counts=Counts(
            ok=rows - sum(kind.count for kind in kinds),
            skipped=counts_by_kind(kinds),
            tokens=_extrapolated(tokens, rows, read),
            image_tokens=_extrapolated(image_tokens, rows, read),
            loss_tokens=_extrapolated(loss_tokens, rows, read),
        ),
        relative_error=_relative_error(rows, lengths, len(skipped)),
        skipped=kinds,
        lengths=lengths,
    )


def _relative_error(rows: int, lengths: Mapping[int, int], skipped: int) -> float:
    """Of the mean number of tokens in a row, skipped ones having none, without replacement."""
    read = sum(lengths.values()) + skipped
    tokens = sum(length * count for length, count in lengths.items())
    if read == rows or tokens == 0 or read < 2:
        return 0.0
    mean = tokens / read
    squares = sum((length - mean) ** 2 * count for length, count in lengths.items())
    variance = (squares + mean**2 * skipped) / (read - 1)
    return _NORMAL_95 * math.sqrt(variance / read * (1 - read / rows)) / mean


def _extrapolated(count: int, rows: int, read: int) -> int:
    return (2 * count * rows + read) // (2 * read)
