"""``benchmarks.storage`` runs, and its facts beside τ are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.benchmarks.storage import ROUNDED, STORED, WIDE, rounded_row
from dspark.train_from_cache.target_head import TargetHead

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "storage.json"
    command = [sys.executable, "-m", "benchmarks.storage", "--small", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    values = {(m["group"], m["name"]): m["values"] for m in found["measurements"]}
    assert all(tau >= 1 for tau in values["tau of dspark", "fp8"] + values["tau of msd", "fp8"])
    overlap = {form.name: values["teachers: overlap", form.name][0] for form in ROUNDED}
    assert overlap["fp32"] == pytest.approx(1, abs=1e-5)
    assert overlap["bf16"] > overlap["fp8, last_hidden_state, too"] > 0.98
    assert [t["name"] for t in found["targets"]] == [
        "tau of dspark: fp8 less bf16",
        "tau of msd: fp8 less bf16",
    ]
    # By hand: two fields of H numbers, ids, three rows of positions, three masks.
    width = int(WIDE["hidden_size"])
    rest = 4 + 3 * 4 + 3
    kilobytes = {form.name: values["kB a token, --drafts msd", form.name][0] for form in STORED}
    assert kilobytes["bf16"] == pytest.approx((4 * width + rest) / 1000)
    assert kilobytes["fp8"] == pytest.approx((3 * width + 4 + rest) / 1000)
    half = kilobytes["bf16, --embeds pictures"]
    assert half == pytest.approx((3 * width + rest) / 1000, rel=1e-3)


def test_a_form_of_the_largest_logits_leaves_the_others_no_chance() -> None:
    head = TargetHead(torch.zeros(5, 4), torch.randn(5, 4))
    row = {"last_hidden_state": torch.randn(3, 4), "logits": torch.tensor([[3.0, 1.0, 2.0, 0, -1]])}
    form = next(f for f in ROUNDED if f.logits == "topk:8")
    two = type(form)("two", logits="topk:2")
    assert rounded_row(row, two, head)["logits"].tolist() == [
        [3.0, -torch.inf, 2.0, -torch.inf, -torch.inf]
    ]
