"""``benchmarks.writer`` runs and compares what it says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "writer.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.writer", "--small"),
            *("--json", str(path), "--folder", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    plain, ours = (m for m in found["measurements"] if m["group"] == "written")
    (target,) = found["targets"]
    assert target["values"] == [a / b for a, b in zip(ours["values"], plain["values"], strict=True)]
    assert target["bound"] == 0.9 and target["at_least"]
    assert not [p for p in tmp_path.iterdir() if p != path]
