"""The benchmark of training runs."""

import json
import subprocess
import sys
from pathlib import Path


def test_train(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    command = [sys.executable, "-m", "dspark.benchmarks.train", "--small", "--json", str(out)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["benchmark"] == "train"
    names = [(m["group"], m["name"]) for m in found["measurements"]]
    shapes = ["fixed shape", "--trim", "--bucket --trim"]
    assert names == [
        *(("a step", name) for name in ("in memory", "from the cache")),
        *((group, name) for group in ("steps", "real tokens") for name in shapes),
    ]
    assert all(len(m["values"]) == 2 and min(m["values"]) > 0 for m in found["measurements"])
    (target,) = found["targets"]
    assert (target["bound"], target["at_least"]) == (1.03, False)
    assert list(tmp_path.iterdir()) == [out]
