"""``benchmarks.capture`` runs, and what it says of padding and memory is so."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.capture", "--small"),
            *("--json", str(path), "--folder", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    groups = {m["group"] for m in found["measurements"]}
    assert groups == {
        "random target: seconds of a pass",
        "random target: user and system time of a pass",
        "bundled target: seconds of a pass",
        "bundled target: user and system time of a pass",
        "bundled target: peak memory",
    }
    longer, memory = found["targets"]
    assert len(longer["values"]) == 2 and longer["bound"] == 1.05 and not longer["at_least"]
    assert memory["met"], "peak memory grows with the number of rows"
    assert all("none is padded beyond its longest row" in note for note in found["notes"])
    assert not [p for p in tmp_path.iterdir() if p != path]
