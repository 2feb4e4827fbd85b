"""What ``dspark capture`` prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.reports.text import plural, printable_lines, size, some_numbers

if TYPE_CHECKING:
    from dspark.capture.run import CaptureReport
    from dspark.capture.skipped import SkippedKind


def capture(report: "CaptureReport") -> str:
    """The closing line of a capture."""
    manifest = report.manifest
    counts = manifest.counts
    if report.missing:
        some = len(report.missing) > 1
        return (
            f"{report.root}: {plural(report.shards_written, 'shard')} written now "
            f"({_written(report)}); not complete: shard{'s' * some} "
            f"{some_numbers(report.missing)} of {manifest.num_shards} "
            f"{'are' if some else 'is'} left to other jobs, the last of which completes the "
            f"{'cache' if report.added is None else 'extension'}; so does this command for all "
            "shards, once they have ended"
        )
    if report.added is not None:
        return _added(report, report.added)
    if report.shards_written == 0 and report.rewritten:
        return (
            f"{report.root}: complete again; {' and '.join(report.rewritten)} written now, no "
            f"shard was missing ({counts.ok:,} samples)"
        )
    if report.shards_written == 0:
        return f"{report.root}: complete already, nothing to do ({counts.ok:,} samples)"
    return (
        f"{report.root}: {counts.ok:,} samples, {counts.tokens:,} tokens in "
        f"{manifest.num_shards} shards ({report.shards_written} written now, "
        f"{_written(report)}); {_skipped(report.skipped)}"
    )


def _written(report: "CaptureReport") -> str:
    """The size of all rows that were written; what they take in zarr is known to the disk alone."""
    compressed = report.manifest.shard_format.codec not in (None, "none")
    return size(report.bytes_written) + " before compression" * compressed


def _added(report: "CaptureReport", added: Sequence[str]) -> str:
    if not added:
        return nothing_to_add(report.root)
    return (
        f"{report.root}: {', '.join(added)} of {report.manifest.counts.ok:,} samples added in "
        f"{report.manifest.num_shards} files beside the shards ({report.shards_written} written "
        f"now, {_written(report)})"
    )


def nothing_to_add(root: str | Path) -> str:
    """The answer to an ``--extend`` that asks for what the cache holds."""
    return f"{root}: all that was asked for is there already, nothing to do"


def _skipped(kinds: Sequence["SkippedKind"]) -> str:
    """The end of a line, and a table where rows were skipped."""
    from dspark.capture.skipped import skipped_table

    if not kinds:
        return "none skipped"
    return f"{sum(kind.count for kind in kinds):,} skipped\n" + printable_lines(
        skipped_table(kinds)
    )
