"""A short run of ``benchmarks/kill_captures.py``."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_captures.py"


def test_killed_and_continued_to_the_same_bytes() -> None:
    size = ("--kills", "4", "--rows", "40", "--shards", "5")
    run = subprocess.run([sys.executable, str(SCRIPT), *size], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 kills" in run.stdout
    assert " 0 faults" in run.stdout
