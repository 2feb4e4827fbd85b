"""``benchmarks.codecs`` runs, and what it says beside time is right."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "codecs.json"
    command = [sys.executable, "-m", "benchmarks.codecs", "--small", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(file.read_text())
    assert found["benchmark"] == "codecs"
    values = {(m["group"], m["name"]): m["values"] for m in found["measurements"]}
    assert all(len(v) == 1 and v[0] > 0 for v in values.values())
    kinds = ("bundled target", "random normal, 1536 wide")
    for kind in kinds:
        for what, rates in (("chunks", ("encode", "decode")), ("shard", ("write", "read"))):
            for rate in rates:
                names = [n for g, n in values if g == f"{what}, {kind}: {rate}"]
                assert names == [n for g, n in values if g == f"{what}, {kind}: size"]
    sizes = {n: v[0] for (g, n), v in values.items() if g == f"shard, {kinds[1]}: size"}
    assert 1 <= sizes["safetensors"] < 1.1
    assert 0.6 < sizes["zarr (zstd 1), chunks of 128 tokens"] < 0.85  # exponents and signs shrink
    assert (
        1 < sizes["zarr (none), chunks of 32 tokens"] < sizes["zarr (none), chunks of 256 tokens"]
    )
