"""What ``dspark inspect`` prints."""

from collections.abc import Sequence
from typing import Any

from dspark.reports.text import plural, printable, size, table
from dspark.schemas.commands import verify_command
from dspark.schemas.shard_format import ShardFormat

_HEADER = ("field", "type", "shape per shard", "bytes/token", "real rows", "with padding")


def inspection(
    summary: dict[str, Any], faults: Sequence[str] = (), unreadable: Sequence[str] = ()
) -> str:
    """What ``dspark inspect`` prints.

    Args:
        summary: of the cache.
        faults: that a shallow verification found.
        unreadable: what it could not read.
    """
    counts, complete = summary["counts"], summary["complete"]
    extended = any(f["part"] for f in summary["fields"])
    skipped = sum(counts["skipped"].values())
    target = summary["target"]
    lines = [
        f"{summary['path']}: "
        + ("DAMAGED (see below), " if faults else "")
        + ("NOT READABLE (see below), " if unreadable else "")
        + printable(f"{target['architecture']} ({target['id']}), ")
        + (
            "complete"
            if complete
            else f"NOT complete: {summary['committed_shards']} of {summary['num_shards']} shards "
            "committed; the same capture command continues it"
        ),
        f"{summary['num_samples']:,} samples in {summary['num_shards']} shards of "
        f"{summary['rows_per_shard']} rows x {summary['max_length']} tokens; "
        + (
            f"{counts['ok']:,} captured, {skipped:,} skipped"
            if complete
            else "captured rows and tokens are counted when the capture ends"
        ),
        (
            f"{counts['tokens']:,} tokens, {counts['image_tokens']:,} of pictures, "
            f"{counts['loss_tokens']:,} supervised; "
            if complete
            else ""
        )
        + f"logits {summary['logits']}"
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
                    size(f["real_bytes"]) if complete else "-",
                    size(f["logical_bytes"]),
                    *([f"plus{f['part']}" if f["part"] else "first"] * extended),
                )
                for f in summary["fields"]
            ],
            (*_HEADER, *(["file"] * extended)),
        ),
        "",
        f"shards{_form(summary['shard_format'])}: "
        + (f"{size(summary['real_bytes'])} of real rows, " if complete else "")
        + (
            f"{size(summary['cache_bytes'])} of the cache are in {summary['mirror']}"
            if summary["mirror"]
            else f"{size(summary['physical_bytes'])} on disk, {size(summary['logical_bytes'])} "
            f"file length; whole cache {size(summary['cache_bytes'])} on disk"
        ),
    ]
    lines += [
        f"{f['name']} is stored where {f['where']} is 1; elsewhere target/ has it, by input_ids"
        for f in summary["fields"]
        if f["where"] is not None
    ]
    if summary["filled_bytes"]:
        lines.append(
            f"padding takes {size(summary['filled_bytes'])} of the disk: a copy filled the holes, "
            "or the file system keeps none; the cache is as good, only larger (cp --sparse=always, "
            "rsync -S or tar -S to ext4, xfs or the like make holes again)"
        )
    lines += [
        f"plus{e['part']} (layers {e['layers'] or 'none'}, logits {e['logits'] or 'none'}): not "
        f"finished, {e['committed_shards']} of {summary['num_shards']} shards are committed; "
        f"'{verify_command(summary['path'])}' names the command that continues it"
        for e in summary["extensions"]
        if not e["complete"]
    ]
    lines += [f"skipped: {n:,} {printable(reason)}" for reason, n in counts["skipped"].items()]
    for word, found, noun in (
        ("DAMAGED", faults, "fault"),
        ("NOT READABLE", unreadable, "file"),
    ):
        if found:
            lines.append(
                f"{word}: {plural(len(found), noun)}, the first: {printable(found[0])}; "
                f"'{verify_command(summary['path'])}' names all"
            )
    return "\n".join(lines)


def _form(document: dict[str, Any]) -> str:
    """Nothing for the usual form of shards."""
    form = ShardFormat.read(document)
    return f" as {form}" if form.is_zarr else ""


def tokens(sample: dict[str, Any]) -> str:
    """The tokens of one sample, marked."""
    head = (
        f"\nsample {sample['sample']} (id {printable(sample['id'] or 'none')}): {sample['status']}"
        + (f", {printable(sample['reason'])}" if sample["reason"] else "")
        + f", {sample['length']} tokens of {sample['max_length']}"
    )
    if not sample["tokens"]:
        return head
    rows = [
        (t["position"], t["id"], repr(t["text"]), t["position_ids"], t["mark"])
        for t in sample["tokens"]
    ]
    return "\n".join([head, table(rows, ("position", "id", "text", "position_ids", "mark"))])
