"""Targets split over two workers, in real processes with gloo."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conversation_data import mixed_rows, write_rows
from family_checkpoints import gemma3
from family_models import make_model
from safetensors.torch import load_file
from split_workers import CAPTURE, CONVERTED, FAMILIES, TENSOR_PARALLEL

import dspark
from dspark.schemas.manifest import identity_differences, read_manifest

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 240


@dataclass(frozen=True)
class Run:
    """Two workers' run: its folder, and what each of them wrote."""

    folder: Path
    reports: list[str]


@pytest.fixture(scope="module")
def run(tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("split")
    for family in ("qwen2_5_vl", "llava", "qwen3_vl"):
        (folder / family).symlink_to(tiny_target(family))
    # In bf16, with the head tied to an embedding that scales what it returns.
    make_model("gemma3", tie_word_embeddings=True).bfloat16().save_pretrained(folder / "gemma3")
    gemma3().save_pretrained(folder / "gemma3")
    for family in CONVERTED:
        make_model(family).save_pretrained(folder / family)
    empty = folder / "qwen3_vl-without-weights"
    shutil.copytree(folder / "qwen3_vl", empty, ignore=shutil.ignore_patterns("*.safetensors"))
    # The first of three shards has text alone.
    rows = mixed_rows(18)
    write_rows(folder / "data.parquet", sorted(rows, key=lambda row: bool(row["images"])))
    return Run(folder, run_workers(folder))


def run_workers(folder: Path) -> list[str]:
    ports = [str(port) for port in free_ports(3)]
    workers = []
    for rank in ("0", "1"):
        env = os.environ | {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        script = str(HERE / "split_workers.py")
        command = [sys.executable, script, str(folder), f"{folder}/report-{rank}", *ports]
        workers.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [worker.communicate(timeout=TIMEOUT_SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    written = [(folder / f"report-{rank}").read_text() for rank in range(2)]
    return [f"{report}\n{error}" for report, error in zip(written, errors, strict=True)]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


CHECKS = [
    *(f"fsdp {family}" for family in FAMILIES),
    *(f"tp {family}" for family in TENSOR_PARALLEL),
    *(f"fsdp weights {family}" for family in CONVERTED),
    f"tp weights {CONVERTED[-1]}",
    "tp without a plan",
    "tp different inputs",
]


@pytest.mark.parametrize("check", CHECKS)
def test_split_target(run: Run, check: str) -> None:
    for report in run.reports:
        assert f"passed: {check}\n" in report, report


def test_a_worker_that_is_killed_is_noticed(run: Run) -> None:
    assert "passed: lost peer\n" in run.reports[0], run.reports[0]


@pytest.fixture(scope="module")
def whole(run: Run) -> Path:
    """The same capture by one process."""
    target, data, out = (str(run.folder / n) for n in ("qwen2_5_vl", "data.parquet", "whole"))
    dspark.capture(3, target=target, data=data, out=out, **CAPTURE)
    return Path(out)


def test_fully_sharded_capture_has_the_bytes_of_one_process(run: Run, whole: Path) -> None:
    for report in run.reports:
        assert "passed: capture fsdp\n" in report, report
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    made = run.folder / "fsdp"
    assert sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file()) == files
    for file in files:
        assert (made / file).read_bytes() == (whole / file).read_bytes(), file


def test_tensor_parallel_capture_differs_by_rounding_alone(run: Run, whole: Path) -> None:
    for report in run.reports:
        assert "passed: capture tp\n" in report, report
    made = run.folder / "tp"
    identities = [read_manifest(root).identity for root in (made, whole)]
    assert identity_differences(*identities) == ["tensor_parallel: 2 there, 1 now"]
    for shard in range(3):
        name = f"shards/shard-{shard:05d}-of-00003.safetensors"
        tensors, expected = load_file(made / name), load_file(whole / name)
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            if tensor.is_floating_point():  # sums over parts, rounded in another order
                largest = tensor.abs().max().item()
                assert (tensors[key] - tensor).abs().max().item() <= 2e-5 * largest, key
            else:
                assert torch.equal(tensors[key], tensor), key
