"""How many CPU cores are this process's to use."""

import os
from pathlib import Path

from dspark.schemas.torchrun import torchrun_number

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores for this process, at least 1: those that it may run on, as the scheduler (taskset,
    Slurm, NUMA binding) and the cgroup's CPU quota (containers) say, shared evenly among the
    processes that torchrun started on this machine.

    Raises:
        InputError: ``LOCAL_WORLD_SIZE`` is no number.
    """
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min(cores, _quota()) / max(1, torchrun_number("LOCAL_WORLD_SIZE", 1))))


def _quota() -> float:
    """Cores' worth of time that this process's cgroup, or one around it, allows (version 2)."""
    try:
        groups = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return float("inf")
    own = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    least = float("inf")
    for folder in (_CGROUPS / own, *(_CGROUPS / own).parents):
        if folder == _CGROUPS.parent:
            break
        try:
            allowed, period = (folder / "cpu.max").read_text().split()
            least = min(least, int(allowed) / int(period))
        except (OSError, ValueError):  # none here; "max"
            continue
    return least
