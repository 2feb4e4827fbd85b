"""Captures by several real processes under torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SHARDS = 6


def options(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("capture", "--shards", str(SHARDS), "--target", str(target), "--data", str(data)),
        *("--out", str(out), "--batch-tokens", "300", *more),
    ]


def start(workers: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """``python -m dspark`` in ``workers`` processes; alone without torchrun."""
    several = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)),
        *("--max-restarts", str(restarts), "-m", "dspark"),
    ]
    how = several if workers > 1 else ["-m", "dspark"]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], timeout: float = 180) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run(workers: int, *arguments: str, restarts: int = 0) -> tuple[int, str, str]:
    return finish(start(workers, *arguments, restarts=restarts))


def wait_until(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Return when ``what`` is true or the process has ended."""
    deadline = time.monotonic() + 120
    while not what() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL torchrun and its workers, which share a session."""
    for pid in [*workers_of(process), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of torchrun's workers, in the order of their start."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]
