"""What a benchmark cannot be run with is said before anything is measured."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["writer", "--json", "/proc/nowhere/x.json"], "argument --json: /proc/nowhere"),
        (["writer", "--folder", "no such folder"], "argument --folder: no such folder"),
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
