"""The rows that were skipped, by reason, for whoever wants to mend them."""

from collections.abc import Iterable
from dataclasses import dataclass

from dspark.capture.bad_row import kind_of

_ROWS = 8
_DETAIL = 100


@dataclass(frozen=True)
class SkippedKind:
    """Rows skipped for one reason.

    Attributes:
        kind: the reason.
        count: rows.
        rows: the first few row numbers.
        detail: of the first row; may be empty.
    """

    kind: str
    count: int
    rows: tuple[int, ...]
    detail: str


def skipped_kinds(skipped: Iterable[tuple[int, str]]) -> tuple[SkippedKind, ...]:
    """Count skipped rows by reason, the most frequent first.

    Args:
        skipped: dataset row and stored reason, in row order.
    """
    counts: dict[str, int] = {}
    rows: dict[str, list[int]] = {}
    details: dict[str, str] = {}
    for row, reason in skipped:
        kind = kind_of(reason)
        counts[kind] = counts.get(kind, 0) + 1
        details.setdefault(kind, reason[len(kind) + 2 :])
        if len(rows.setdefault(kind, [])) < _ROWS:
            rows[kind].append(row)
    return tuple(
        SkippedKind(kind, counts[kind], tuple(rows[kind]), details[kind])
        for kind in sorted(counts, key=lambda kind: (-counts[kind], kind))
    )


def counts_by_kind(kinds: Iterable[SkippedKind]) -> dict[str, int]:
    """Rows by reason, in the order of the reasons' letters, for the manifest."""
    return {kind.kind: kind.count for kind in sorted(kinds, key=lambda kind: kind.kind)}


def skipped_table(kinds: Iterable[SkippedKind]) -> str:
    """One line for each reason: how many rows, which, and what was wrong with the first."""
    kinds = list(kinds)
    width = max((len(k.kind) for k in kinds), default=0)
    digits = max((len(f"{k.count:,}") for k in kinds), default=0)
    return "\n".join(
        f"  {k.count:{digits},}  {k.kind:{width}}  row{'s' * (k.count > 1)} "
        + ", ".join(map(str, k.rows))
        + (", …" if k.count > len(k.rows) else "")
        + (f"  ({_clipped(k.detail)})" if k.detail else "")
        for k in kinds
    )


def _clipped(detail: str) -> str:
    return detail if len(detail) <= _DETAIL else detail[: _DETAIL - 1] + "…"
