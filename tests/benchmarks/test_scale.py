"""``benchmarks.scale`` runs, and its facts beside time are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.benchmarks import scale
from dspark.benchmarks.hollow_cache import write_hollow_cache
from dspark.verify.shallow import check_shallow

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    command = [sys.executable, "-m", "benchmarks.scale", "--small", "--repeat", "2"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["benchmark"] == "scale"
    names = {m["group"]: 0 for m in found["measurements"]}
    assert {"opening: time", "opening: memory", "capture's finish: time"} <= names.keys()
    assert {"verify, shallow: memory", "a random row of an open shard: time"} <= names.keys()
    assert all(len(m["values"]) == 2 for m in found["measurements"])
    assert all(value >= 0 for m in found["measurements"] for value in m["values"])
    assert len(found["targets"]) == 4
    assert any("1 request a shard" in note for note in found["notes"])
    assert list(tmp_path.iterdir()) == [file]


def test_a_hollow_cache_is_sound_at_first_sight(tmp_path: Path) -> None:
    from dspark.schemas.manifest import read_manifest

    write_hollow_cache(tmp_path, 53, 7)
    shallow = check_shallow(tmp_path, read_manifest(tmp_path))
    assert (shallow.faults, shallow.committed, shallow.counts.ok) == ([], [7], 53)


def test_a_line_is_found_again() -> None:
    sizes = [(10, 1), (100, 1), (100, 50), (1000, 7), (5, 5)]
    for fixed, by_row, by_shard in ((3.0, 0.5, 2.0), (1.0, 0.0, 4.0), (0.1, 2.0, 0.0)):
        points = {(m, n): fixed + by_row * m + by_shard * n for m, n in sizes}
        assert scale.fit(points) == pytest.approx((fixed, by_row, by_shard), abs=1e-9)
    falling = {(m, n): 1000.0 - m for m, n in sizes[:3]}
    assert min(scale.fit(falling)) >= 0
