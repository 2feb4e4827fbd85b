"""A short run of ``benchmarks/kill_captures.py``, with one worker (for more: ``tests/workers``).

With this seed all four kills are drawn for one cache: while ``target/`` is written, inside a shard,
between a shard and its index, inside a shard.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_captures.py"


def test_killed_and_continued_to_the_same_bytes() -> None:
    how = ("--kills", "4", "--rows", "60", "--shards", "6", "--most-workers", "1", "--seed", "308")
    run = subprocess.run([sys.executable, str(SCRIPT), *how], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 kills" in run.stdout
    assert " 0 faults" in run.stdout
