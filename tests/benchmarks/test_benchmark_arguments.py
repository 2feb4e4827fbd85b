"""What a benchmark cannot be run with is said before anything is measured."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["writer", "--json", "/proc/nowhere/x.json"], "argument --json: /proc/nowhere"),
        (["writer", "--folder", "no such folder"], "argument --folder: no such folder"),
        (["writer", "--gigabytes", "nan"], "argument --gigabytes: nan: give a number above 0"),
        (["storage", "--seeds", "0"], "argument --seeds: 0: give a whole number"),
        (["document", "--json"], "unrecognized arguments: --json"),
        (["writer", "--repetitions", "0"], "argument --repetitions: 0: give a whole number"),
        (["compare_drafts", "--cache", "no-cache", "--out", "out"], "no-cache is not a cache"),
    ],
)
def test_a_wrong_argument(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"dspark.benchmarks.{arguments[0]}", *arguments[1:]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark.benchmarks.writer", "--folder", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert said == f"writer: stopped by {how.name}\n"
    assert not list(tmp_path.iterdir())
