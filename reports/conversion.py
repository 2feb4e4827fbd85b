"""What ``dspark convert`` prints."""

from typing import TYPE_CHECKING

from dspark.reports.text import plural, size, some_numbers
from dspark.schemas.fields import FIELDS

if TYPE_CHECKING:
    from dspark.convert.run import ConvertReport


def conversion(report: "ConvertReport") -> str:
    """What was written, and the sizes before and after."""
    manifest = report.manifest
    lines = []
    some_fields = FIELDS in manifest.identity
    if report.missing:
        some = len(report.missing) > 1
        lines.append(
            f"{report.root}: {plural(report.converted, 'shard')} written now; not complete: "
            f"shard{'s' * some} {some_numbers(report.missing)} of {manifest.num_shards} "
            f"{'are' if some else 'is'} left to other jobs, the last of which completes the cache; "
            "so does this command for all shards, once they have ended"
        )
    elif report.converted:
        lines.append(
            f"{report.root}: {plural(report.converted, 'shard')} written now, "
            f"{manifest.counts.ok:,} samples in {plural(manifest.num_shards, 'shard')}, in "
            f"{report.seconds:.1f} s"
        )
    else:
        lines.append(f"{report.root}: complete already, nothing to do")
    if not report.missing:
        lines.append(
            f"shards on disk: {size(report.bytes_before)} as {report.source_format}, "
            f"{size(report.bytes_after)} as {manifest.shard_format}"
            f" with {plural(len(manifest.all_fields), 'field')}"
            + ", the stored logits among them"
            * (some_fields and manifest.best_logits != "head")
        )
    if report.left_out:
        lines.append(
            f"left out: {plural(report.left_out, 'extension')} of {report.source} that "
            f"{'is' if report.left_out == 1 else 'are'} not finished"
        )
    return "\n".join(lines)
