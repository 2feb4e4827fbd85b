"""The benchmark of the reader runs, and what is no matter of time is as it says."""

import json
import subprocess
import sys
from pathlib import Path


def test_reader(tmp_path: Path) -> None:
    out = tmp_path / "reader.json"
    command = [sys.executable, "-m", "dspark.benchmarks.reader", "--small", "--json", str(out)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["benchmark"] == "reader"
    values = {(m["group"], m["name"]): m["values"] for m in found["measurements"]}
    warm = [name for group, name in values if group == "warm"]
    assert warm[:2] == ["dspark", "dspark, --trim"] and len(warm) == 6
    for group, name in values:
        if group in ("warm", "cold"):
            assert len(values[group, name]) == 2 and min(values[group, name]) > 0
    disk = {name: size for (group, name), (size, *_) in values.items() if group == "on disk"}
    # Most of what padded files hold is padding; a cache has real rows only, but more fields.
    assert disk["padded safetensors"] > 1.5 * disk["dspark"]
    assert 0.99 < disk["one safetensors file per sample"] < disk["dspark"]
    targets = {t["name"]: t for t in found["targets"]}
    assert [t["bound"] for t in targets.values()] == [2.5, 0.9, 200.0]
    assert targets["memory beyond the ring"]["met"]
    assert list(tmp_path.iterdir()) == [out]
