"""What ``dspark inspect`` prints."""

from collections.abc import Sequence
from typing import Any

from dspark.reports.text import plural, size, table


def inspection(summary: dict[str, Any], faults: Sequence[str] = ()) -> str:
    """What ``dspark inspect`` prints.

    Args:
        summary: of the cache.
        faults: that a shallow verification found.
    """
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
    if summary["filled_bytes"]:
        lines.append(
            f"padding takes {size(summary['filled_bytes'])} of the disk: a copy filled the holes, "
            "or the file system keeps none; the cache is as good, only larger (cp --sparse=always, "
            "rsync -S or tar -S to ext4, xfs or the like make holes again)"
        )
    lines += [f"skipped: {n:,} {reason}" for reason, n in counts["skipped"].items()]
    if faults:
        lines.append(
            f"DAMAGED: {plural(len(faults), 'fault')}, the first: {faults[0]}; "
            f"'dspark verify --cache {summary['path']}' names all"
        )
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
