"""A copy that fills the holes is the same cache, only larger."""

import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from synthetic_cache import write_cache

from dspark.reports import inspection as report
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.inspection import inspect_cache
from dspark.train_from_cache.train import train_draft

OPTIONS: dict[str, Any] = {
    "steps": 6, "batch_size": 3, "device": "cpu", "eval_fraction": 0.3,
    "draft_config": {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, "num_anchors": 3},
}  # fmt: skip


def test_same_numbers_and_inspect_says_so(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache", samples=12, max_length=4096, lengths=[30] * 12)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", "--sparse=never", str(cache), str(copy)], check=True)

    one, two = Cache(cache), Cache(copy)
    for i in range(12):
        a, b = one[i], two[i]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)

    results = [train_draft(str(p), "dspark", f"{p}-draft", **OPTIONS) for p in (cache, copy)]
    assert results[0].after == results[1].after
    weights = [load_file(f"{p}-draft/model.safetensors") for p in (cache, copy)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])

    sparse, filled = inspect_cache(str(cache)), inspect_cache(str(copy))
    assert sparse["logical_bytes"] == filled["logical_bytes"] <= filled["physical_bytes"]
    assert sparse["filled_bytes"] == 0
    assert filled["filled_bytes"] == filled["physical_bytes"] - filled["real_bytes"]
    assert "padding takes" not in report.inspection(sparse)
    assert "a copy filled the holes" in report.inspection(filled)
