"""Short trainings of several drafts, and what their tests compare."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ARCHS = ["msd", "dspark", "eagle3"]
OPTIONS: dict[str, Any] = {
    "steps": 12, "batch_size": 5, "lr": 3e-3, "save_every": 5, "log_every": 1, "device": "cpu",
    "progress": False, "eval_fraction": 0.2, "curriculum": True,
}  # fmt: skip
CONFIG = {
    "dspark.num_hidden_layers": 1,
    "dspark.block_size": 4,
    "dspark.markov_rank": 8,
    "dspark.num_anchors": 3,
    "eagle3.ttt_steps": 3,
    "eagle3.draft_vocab_size": 16,
    "eagle3.target_layer_ids": [0, 1, 2],
}


def config_of(arch: str) -> dict[str, Any]:
    """The entries of ``CONFIG`` for one draft."""
    return {k.split(".")[1]: v for k, v in CONFIG.items() if k.startswith(arch + ".")}


def records(out: Path) -> list[dict[str, Any]]:
    """What a training recorded, without its speed."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "samples_per_s"} for r in lines]


def steps(out: Path) -> list[dict[str, Any]]:
    """The records of its steps."""
    return [r for r in records(out) if r["event"] == "step"]


def assert_same_weights(one: Path, two: Path) -> None:
    """Two trainings ended in the same bits."""
    for name in ("model.safetensors", "training_state/state.safetensors"):
        a, b = load_file(one / name), load_file(two / name)
        assert a.keys() == b.keys()
        assert [k for k in a if not torch.equal(a[k], b[k])] == []


def assert_close_steps(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    """Two trainings had the same losses and gradients at every step."""
    a, b = steps(one), steps(two)
    assert [r["step"] for r in a] == [r["step"] for r in b]
    for x, y in zip(a, b, strict=True):
        assert x["lr"] == y["lr"] and x["terms"].keys() == y["terms"].keys()
        for got, want in [
            (x["loss"], y["loss"]),
            (x["grad_norm"], y["grad_norm"]),
            *((x["terms"][name], y["terms"][name]) for name in x["terms"]),
        ]:
            assert abs(got - want) <= tolerance * max(1, abs(want)), (x, y)
