"""One process and several train alike: the same order, losses and gradients, also when killed and
resumed in another number."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from runs import ARCHS, CONFIG, OPTIONS, assert_close_steps, records, steps
from safetensors.torch import load_file
from synthetic_cache import write_cache

from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.train import train_drafts

DRIVER = Path(__file__).with_name("rank_driver.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def job(cache: Path, out: Path, archs: list[str] = ARCHS, **options: Any) -> dict[str, Any]:
    config = {k: v for k, v in CONFIG.items() if k.split(".")[0] in archs}
    return {
        "cache": str(cache),
        "archs": archs,
        "out": str(out),
        "draft_config": config,
        **(OPTIONS | options),
    }


def train(jobs: list[dict[str, Any]], *, processes: int) -> None:
    """Train in processes that die in the last job."""
    how = TORCHRUN if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *how, str(DRIVER), json.dumps(jobs)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode != 0 and "SIGKILL" in done.stderr or done.returncode == -SIGKILL, (
        done.stdout + done.stderr
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("ranks") / "cache")


@pytest.fixture(scope="module")
def runs(cache: Path) -> Path:
    """All trainings of this file, in as few processes as it takes."""
    at, dead = cache.parent, {"die_at": 8}
    alone = [
        job(cache, at / "one"),
        job(cache, at / "one_average", ema=0.9),
        job(cache, at / "parts", accumulate=3),
        job(cache, at / "one_bucketed", bucket=True),
        job(cache, at / "few_one", ["msd"], batch_size=1),
        job(cache, at / "one_then_two") | dead,
    ]
    train(alone, processes=1)
    shutil.copytree(at / "one_then_two", at / "one_then_sharded")
    together = [
        job(cache, at / "two"),
        job(cache, at / "two_parts", accumulate=2),
        job(cache, at / "two_bucketed", bucket=True, trim=True),
        job(cache, at / "few_two", ["msd"], batch_size=1),
        job(cache, at / "sharded", fsdp=True),
        job(cache, at / "sharded_average", accumulate=2, fsdp=True, ema=0.9),
        job(cache, at / "one_then_two", resume=True),
        job(cache, at / "one_then_sharded", resume=True, fsdp=True),
        job(cache, at / "sharded_then_one", fsdp=True) | {"fail_at": 8},
        job(cache, at / "stopped_then_one") | {"stop_at": 6},
        job(cache, at / "two_then_one") | dead,
    ]
    train(together, processes=2)
    for out in ("two_then_one", "sharded_then_one", "stopped_then_one"):
        train_drafts(**job(cache, at / out, resume=True))
    return at


def rows_of(out: Path) -> list[list[int]]:
    """The rows of each step that the processes together took; each has its longest ones first."""
    by_rank = [json.loads(path.read_text()) for path in sorted(out.glob("rows.*.json"))]
    assert len(by_rank) == (1 if out.name in ("one", "one_bucketed", "few_one") else 2)
    return [sorted(sum((rows[step] for rows in by_rank), [])) for step in by_rank[0]]


@pytest.mark.parametrize(
    "how",
    [
        "parts",
        "two",
        "two_parts",
        "sharded",
        "one_then_two",
        "two_then_one",
        "one_then_sharded",
        "sharded_then_one",
        "stopped_then_one",
    ],
)
def test_losses_and_gradients_are_those_of_one_process(runs: Path, how: str) -> None:
    for arch in ARCHS:
        assert len(steps(runs / how / arch)) == OPTIONS["steps"]
        assert_close_steps(runs / how / arch, runs / "one" / arch)
        one, other = (load_file(runs / x / arch / "model.safetensors") for x in ("one", how))
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(other[name], one[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("how", ["two", "sharded", "few_two", "two_bucketed"])
def test_the_order_is_that_of_one_process(runs: Path, how: str) -> None:
    alone = {"few_two": "few_one", "two_bucketed": "one_bucketed"}
    one = rows_of(runs / alone.get(how, "one"))
    assert rows_of(runs / how) == one
    assert len(one) == OPTIONS["steps"]


@pytest.mark.parametrize("how", ["two", "sharded"])
def test_metrics_are_those_of_one_process(runs: Path, how: str) -> None:
    for arch in ARCHS:
        found, want = records(runs / how / arch), records(runs / "one" / arch)
        assert [(r["event"], r["step"]) for r in found] == [(r["event"], r["step"]) for r in want]
        for got, expected in ((found[0], want[0]), (found[-1], want[-1])):
            assert got["anchors"] == expected["anchors"] and got["rows"] == expected["rows"]
            for name in ("tau", "agreement", "acceptance"):
                assert got[name] == pytest.approx(expected[name], abs=1e-3), name


def test_each_trims_its_share_of_a_bucket(runs: Path) -> None:
    for arch in ARCHS:
        assert_close_steps(runs / "two_bucketed" / arch, runs / "one_bucketed" / arch)
    assert rows_of(runs / "one_bucketed") != rows_of(runs / "one")


def test_all_stop_after_the_same_step_when_one_is_asked_to(runs: Path) -> None:
    rows = rows_of(runs / "stopped_then_one")
    assert rows == rows_of(runs / "one")[:7]
    assert all(rows), "both were at the same step"


def test_a_process_without_rows_takes_part(runs: Path) -> None:
    assert_close_steps(runs / "few_two" / "msd", runs / "few_one" / "msd")


def test_an_average_is_sharded_like_its_weights(runs: Path) -> None:
    for arch in ARCHS:
        assert_close_steps(runs / "sharded_average" / arch, runs / "one_average" / arch)
        a, b = (
            load_file(runs / how / arch / "model.safetensors")
            for how in ("sharded_average", "one_average")
        )
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)


def test_a_sharded_draft_is_saved_whole(runs: Path) -> None:
    for arch in ARCHS:
        config = [(runs / how / arch / "config.json").read_bytes() for how in ("one", "sharded")]
        assert config[0] == config[1]
        loaded = draft_class(arch).from_pretrained(runs / "sharded" / arch)
        stored = load_file(runs / "sharded" / arch / "model.safetensors")
        assert all(torch.equal(loaded.state_dict()[name], stored[name]) for name in stored)
