"""How often a program goes to the file system, counted by the kernel."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

KINDS = {
    "opens": ("openat",),
    "looks (stat, access)": ("newfstatat", "statx", "fstat", "access", "faccessat2", "readlink"),
    "reads": ("read", "pread64", "preadv", "preadv2"),
    "writes": ("write", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate"),
    "locks": ("flock",),
    "fsyncs": ("fsync", "fdatasync"),
    "renames and removals": ("rename", "unlink"),
    "listings": ("getdents64",),
}
"""System calls by what they ask of a file system."""

_CALL = re.compile(r"^(?:\d+ +)?(?:<\.\.\. )?(\w+)")


def can_count() -> bool:
    """Whether strace is here and may be used."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"]).returncode == 0


def count_operations(script: str, folder: Path, *arguments: str) -> dict[str, Counter[str]]:
    """Run a Python script, and count its operations on what is in a folder.

    Args:
        script: calls its own ``mark(name)`` where another count begins.
        folder: whose files count.
        arguments: ``sys.argv[1:]`` of the script.

    Returns:
        For each mark, operations of each kind until the next.

    Raises:
        RuntimeError: the script failed.
    """
    calls = {call: kind for kind, some in KINDS.items() for call in some}
    mark = f"import os\ndef mark(name): os.access({str(folder)!r} + '/mark:' + name + ':', 0)\n"
    with tempfile.NamedTemporaryFile("r") as trace:
        done = subprocess.run(
            [
                *("strace", "-f", "-y", "-qq", "--seccomp-bpf", "-o", trace.name),
                *("-e", "trace=" + ",".join(f"?{call}" for call in calls)),
                *(sys.executable, "-c", mark + script, *arguments),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        counts: dict[str, Counter[str]] = {}
        now: Counter[str] = Counter()
        for line in trace:
            # The second half of a call that another thread's interrupted names no file.
            found = _CALL.match(line)
            if str(folder) not in line or found is None or found[1] not in calls:
                continue
            if "/mark:" in line:
                now = counts.setdefault(line.split("/mark:")[1].split(":")[0], Counter())
            else:
                now[calls[found[1]]] += 1
    return counts
