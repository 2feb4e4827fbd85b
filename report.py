"""What the commands print on stdout."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.capture.dry_run import DryRun
    from dspark.capture.run import CaptureReport
    from dspark.capture.skipped import SkippedKind
    from dspark.train_from_cache.train import TrainResult


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """A plain table: first column left, the others right."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def size(count: float) -> str:
    """Bytes for a reader, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _skipped(kinds: Sequence["SkippedKind"]) -> str:
    """The end of a line, and a table where rows were skipped."""
    from dspark.capture.skipped import skipped_table

    if not kinds:
        return "none skipped"
    return f"{sum(kind.count for kind in kinds):,} skipped\n" + skipped_table(kinds)


def capture(report: "CaptureReport") -> str:
    """The closing line of a capture."""
    manifest = report.manifest
    counts = manifest.counts
    if report.shards_written == 0:
        return f"{report.root}: complete already, nothing to do ({counts.ok:,} samples)"
    return (
        f"{report.root}: {counts.ok:,} samples, {counts.tokens:,} tokens in "
        f"{manifest.num_shards} shards ({report.shards_written} written now, "
        f"{size(report.bytes_written)}); {_skipped(report.skipped)}"
    )


def dry_run(run: "DryRun") -> str:
    """What a capture would write."""
    manifest = run.manifest
    counts = manifest.counts
    total = sum(run.bytes_per_token.values())
    rows = [
        (f.name, f.dtype, f"{run.bytes_per_token[f.name]:,}", size(f.token_bytes * counts.tokens))
        for f in manifest.fields
    ]
    return "\n".join(
        [
            f"{manifest.data}: {run.layout}",
            f"{manifest.num_samples:,} rows: {counts.ok:,} to capture, {_skipped(run.skipped)}",
            f"{counts.tokens:,} tokens, {counts.image_tokens:,} of pictures, "
            f"{counts.loss_tokens:,} supervised; layers "
            f"{','.join(map(str, manifest.layers)) or 'none'}, logits {manifest.logits}",
            "",
            table(
                [*rows, ("total", "", f"{total:,}", size(run.real_bytes))],
                ("field", "type", "bytes/token", "real rows"),
            ),
            "",
            f"{manifest.num_shards} shards of {manifest.rows_per_shard} rows x "
            f"{manifest.max_length} tokens: {size(run.real_bytes)} of real rows to store, "
            f"{size(run.padded_bytes)} file length with padding, which takes no disk where the "
            "file system has holes. Nothing was written.",
        ]
    )


def number(value: float | None, digits: int = 2) -> str:
    """A measured number, or a dash where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A measured share, or a dash where there was nothing to measure."""
    return "-" if value is None else f"{100 * value:.1f} %"


_TRAINING = ("", "before", "after")


def training(result: "TrainResult") -> str:
    """Held-out acceptance before and after a training."""
    before, after = result.before or {}, result.after
    rows = [
        (label, shown(before.get(key)), shown(after.get(key)))
        for label, key, shown in (
            ("tau: tokens per round, with bonus token", "tau", number),
            ("tau, greedy", "tau_greedy", number),
            ("top-1 agreement, all supervised tokens", "agreement", percent),
            ("top-1 agreement, picture-grounded tokens", "agreement_grounded", percent),
        )
    ]
    earlier = before.get("acceptance") or [None] * len(after["acceptance"])
    rows[2:2] = [
        (f"acceptance rate of draft token {k + 1}", percent(b), percent(a))
        for k, (b, a) in enumerate(zip(earlier, after["acceptance"], strict=True))
    ]
    measured = [f"measured on {result.eval_rows:,} held-out rows", table(rows, _TRAINING)]
    if not result.eval_rows:
        measured = ["nothing held out, so nothing measured"]
    done = "finished already" if result.already_finished else f"{result.steps:,} steps"
    return "\n".join(
        [
            f"{result.arch}: {done} on {result.train_rows:,} rows, "
            f"{result.trainable_parameters:,} trained parameters; {measured[0]}",
            *measured[1:],
            f"draft in {result.out}",
        ]
    )


def inspection(summary: dict[str, Any]) -> str:
    """What ``dspark inspect`` prints."""
    counts = summary["counts"]
    skipped = sum(counts["skipped"].values())
    target = summary["target"]
    lines = [
        f"{summary['path']}: {target['architecture']} ({target['id']}), "
        + (
            "complete"
            if summary["complete"]
            else f"NOT complete: {summary['committed_shards']} of {summary['num_shards']} shards "
            "committed; the same capture command continues it"
        ),
        f"{summary['num_samples']:,} samples in {summary['num_shards']} shards of "
        f"{summary['rows_per_shard']} rows x {summary['max_length']} tokens; {counts['ok']:,} "
        f"captured, {skipped:,} skipped",
        f"{counts['tokens']:,} tokens, {counts['image_tokens']:,} of pictures, "
        f"{counts['loss_tokens']:,} supervised; logits {summary['logits']}"
        + (
            f" (recomputed within {summary['head_error']:.3g})"
            if summary["head_error"] is not None
            else ""
        ),
        "",
        table(
            [
                (
                    f["name"],
                    f["dtype"],
                    "x".join(map(str, f["shape"])),
                    f"{f['token_bytes']:,}",
                    size(f["real_bytes"]),
                    size(f["logical_bytes"]),
                )
                for f in summary["fields"]
            ],
            ("field", "type", "shape per shard", "bytes/token", "real rows", "with padding"),
        ),
        "",
        f"shards: {size(summary['real_bytes'])} of real rows, {size(summary['physical_bytes'])} on "
        f"disk, {size(summary['logical_bytes'])} file length; whole cache "
        f"{size(summary['cache_bytes'])} on disk",
    ]
    lines += [f"skipped: {n:,} {reason}" for reason, n in counts["skipped"].items()]
    return "\n".join(lines)


def tokens(sample: dict[str, Any]) -> str:
    """The tokens of one sample, marked."""
    head = (
        f"\nsample {sample['sample']} (id {sample['id'] or 'none'}): {sample['status']}"
        + (f", {sample['reason']}" if sample["reason"] else "")
        + f", {sample['length']} tokens of {sample['max_length']}"
    )
    if not sample["tokens"]:
        return head
    rows = [
        (t["position"], t["id"], repr(t["text"]), t["position_ids"], t["mark"])
        for t in sample["tokens"]
    ]
    return "\n".join([head, table(rows, ("position", "id", "text", "position_ids", "mark"))])
