"""What ``dspark verify`` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.reports.text import plural, printable, size, some_numbers, table
from dspark.schemas.commands import (
    NOT_RECORDED,
    capture_command,
    finish_extension_command,
    making,
    repair_command,
    to_repeat,
)

if TYPE_CHECKING:
    from dspark.verify.compare import Comparison
    from dspark.verify.repair import Repair
    from dspark.verify.result import Verification

_LINES = 50


def verification(found: "Verification") -> str:
    """Each fault in a line, and what the cache is."""
    return "\n".join(
        [
            *_some(found.faults),
            *_some(found.unreadable),
            *_some(found.notes),
            f"{found.location}: {_verdict(found)}",
        ]
    )


def next_steps(found: "Verification", repaired: "Repair | None" = None) -> str:
    """What a repair did, and the way out; empty for a sound cache."""
    lines = []
    if found.url is not None:
        if not found.faults:
            return ""
        return (
            "copy what is damaged there once more from where the cache was made; if it is damaged "
            f"there as well, '{repair_command(Path('CACHE'))}' there takes it out, so that the "
            "capture makes just that again"
        )
    if repaired is not None and found.faults:
        lines.append(_repaired(repaired))
    elif found.faults:
        lines.append(
            f"'{repair_command(found.root)}' takes out what is damaged, so that the "
            f"{_making(found)} makes just that again"
        )
    if found.unreadable:
        lines.append(
            "what cannot be read may be sound, so no repair takes it out; make it readable and "
            "verify again"
        )
    else:
        lines += _capture(found)
    return "\n".join(lines)


def _making(found: "Verification") -> str:
    return "capture" if found.manifest is None else making(found.manifest)


def _some(things: Sequence[object]) -> list[str]:
    more = len(things) - _LINES
    return [
        *map(printable, things[:_LINES]),
        *([f"… and {more:,} more; --json has all"] * (more > 0)),
    ]


def _verdict(found: "Verification") -> str:
    manifest = found.manifest
    if manifest is None:
        return "damaged; the manifest says what every byte means, so nothing else was checked"
    if found.unreadable:
        how = f"{found.rows:,} rows, as far as they can be read"
    elif found.deep:
        rate = found.bytes_read / max(found.seconds, 1e-9)
        how = (
            f"every byte of {found.rows:,} rows read: {size(found.bytes_read)} in "
            f"{found.seconds:.1f} s, {size(rate)}/s"
        )
    else:
        how = (
            f"{found.rows:,} rows, by sizes, headers, indexes and counts in {found.seconds:.1f} s; "
            "--deep reads every byte"
        )
    checked = f"{found.shards:,} of {manifest.num_shards:,} shards checked ({how})"
    if found.faults:
        damaged = sorted({f.shard for f in found.faults if f.shard is not None})
        which = f" ({some_numbers(damaged)})" if damaged else ""
        return (
            f"damaged: {plural(len(found.faults), 'fault')}, "
            f"{plural(len(damaged), 'damaged shard')}{which}; {checked}"
        )
    if found.unreadable:
        files = len({fault.file for fault in found.unreadable})
        return (
            f"cannot tell, {plural(files, 'file')} cannot be read; nothing wrong so far; {checked}"
        )
    if not manifest.complete:
        return (
            f"cannot tell, the {making(manifest)} is not finished; nothing wrong so far; {checked}"
        )
    return f"sound; {checked}"


def _repaired(repaired: "Repair") -> str:
    parts = []
    if repaired.shards:
        parts.append(f"no longer committed: shards {some_numbers(repaired.shards)}")
    if repaired.files:
        parts.append(f"removed: {printable(', '.join(repaired.files))}")
    if repaired.busy:
        parts.append(f"left to the capture that writes them: shards {some_numbers(repaired.busy)}")
    if repaired.sound:
        parts.append(
            f"left, because sound when read once more: {printable(', '.join(repaired.sound))}"
        )
    return "; ".join(parts or ["nothing to remove; the counts are made again"])


def _capture(found: "Verification") -> list[str]:
    """What finishes the cache, if anything has to."""
    if found.manifest is None:
        return ["then: the dspark capture command that made this cache, and verify again"]
    commands = _extend_commands(found)
    if found.capture_to_finish:
        commands.insert(0, capture_command(found.root, found.manifest))
    if not commands:
        return []
    return [
        *(f"then: {printable(command)}" for command in commands),
        *(
            [f"      (with {NOT_RECORDED} where the capture had them)"]
            if to_repeat(found.manifest)
            else []
        ),
    ]


def _extend_commands(found: "Verification") -> list[str]:
    return [
        finish_extension_command(found.root, found.manifest, number)
        for number in found.extensions_to_finish
        if found.manifest is not None and found.url is None
    ]


def comparison(compared: "Comparison") -> str:
    """How far stored rows are from their recapture."""
    lines = [f"not the captured target: {printable(d)}" for d in compared.target_differences]
    lines += [f"not where it was captured: {printable(d)}" for d in compared.other_differences]
    lines += _some(compared.faults)
    if not compared.samples:
        return "\n".join([*lines, "no row compared: the target has another number of layers"])
    rows = [
        (
            f.name,
            "yes" if f.equal else "no",
            f"{f.largest:.3g}",
            f"{f.relative:.2g}",
            f"{f.token_error:.2g}",
        )
        for f in compared.fields
        if f.rows
    ]
    header = (
        "field",
        "equal bit for bit",
        "largest difference",
        "as share of the largest number",
        "largest error of a token's vector",
    )
    if compared.differs:
        verdict = "not what this target gives"
    elif compared.equal:
        verdict = "equal bit for bit"
    else:
        verdict = (
            f"equal but for rounding (a token's vector may be off by {compared.tolerance:g} of its "
            "length)"
        )
        if not compared.other_differences:
            verdict += (
                "; but bits differ although kind of device and library versions are those of the "
                "capture, which only another number of threads explains (it is not recorded): "
                "--deep tells whether the bytes have changed since they were captured"
            )
    return "\n".join(
        [
            *lines,
            table(rows, header),
            f"{len(compared.samples):,} rows captured again "
            f"({some_numbers(compared.samples, 16)}): {verdict}",
        ]
    )


def document(
    found: "Verification", repaired: "Repair | None", compared: "Comparison | None"
) -> dict[str, Any]:
    """A verification as JSON-ready values; sizes in bytes, times in seconds."""
    manifest = found.manifest
    return {
        "path": found.location,
        "complete": found.complete,
        "deep": found.deep,
        "shards": found.shards,
        "num_shards": None if manifest is None else manifest.num_shards,
        "rows": found.rows,
        "bytes_read": found.bytes_read,
        "seconds": found.seconds,
        "faults": [asdict(fault) for fault in found.faults],
        "unreadable": [asdict(fault) for fault in found.unreadable],
        "notes": list(found.notes),
        "repaired": None if repaired is None else asdict(repaired),
        "compared": None if compared is None else asdict(compared),
        "capture_command": None
        if manifest is None or found.url
        else capture_command(found.root, manifest),
        "extend_commands": _extend_commands(found),
    }
