"""A flipped byte is found and named, or changes nothing that the cache says.

``benchmarks/flip_bytes.py`` does the same a thousand times.
"""

from collections.abc import Callable
from pathlib import Path

from flipped_bytes import capture_small, flips


def test_random_flips(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    cache = capture_small(tmp_path, tiny_target("qwen2_5_vl"), "topk:4", rows=14)
    done = list(flips([cache], 80, seed=1))
    places = {"columns.safetensors", "index", "manifest.json", "shards: real tokens", "target"}
    assert places <= {f.place for f in done}
    for flip in done:
        assert flip.found or flip.harmless, flip
        assert flip.named or not flip.found, flip
        assert flip.found or flip.place in ("shards: padding", "index"), flip
