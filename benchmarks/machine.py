"""The machine that a benchmark runs on, and the memory of its processes."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import psutil
import torch


def machine(folder: Path) -> dict[str, str | int]:
    """What a reader must know of this machine to compare numbers with another's.

    Args:
        folder: where the benchmark keeps its files.
    """
    facts: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(psutil.virtual_memory().total / 2**30),
        "file system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def peak_memory() -> int:
    """Most resident bytes of this process so far."""
    return _status("VmHWM")


def resident_memory() -> int:
    """Resident bytes of this process that are its own: not those of files it has mapped."""
    return _status("RssAnon")


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.+)", info)
    return found[1] if found else platform.machine()


def _file_system(folder: Path) -> str:
    path = folder.resolve()
    mounted = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    return next(mounted[str(p)] for p in (path, *path.parents) if str(p) in mounted)
