"""Conversions killed at any moment: the same command goes on, and nothing of them stays behind."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from synthetic_cache import add_extension, write_cache

import dspark
from dspark.convert.run import convert
from dspark.schemas.claims import Claim
from dspark.schemas.paths import CachePaths


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_cache(
        tmp_path_factory.mktemp("killed") / "cache", samples=200, shards=8, layers=(0, 1)
    )
    add_extension(root, layers=(3,))
    return root


def command(cache: Path, to: Path, form: str, workers: int) -> list[str]:
    given = ["--cache", str(cache), "--to", str(to), "--format", form]
    return [sys.executable, "-m", "dspark.cli", "convert", *given, "--num-workers", str(workers)]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def wait_for_shards(process: "subprocess.Popen[bytes]", to: Path, count: int) -> None:
    while process.poll() is None and len(list(to.glob("index/*.parquet"))) < count:
        time.sleep(0.002)


@pytest.mark.parametrize("form", ["zarr", "safetensors"])
def test_killed_and_continued_to_the_same_bytes(cache: Path, tmp_path: Path, form: str) -> None:
    """A worker or the parent, inside a shard or between two."""
    source = cache
    if form == "safetensors":
        source = tmp_path / "source"
        convert(str(cache), str(source), format="zarr", num_workers=1)
        whole = files(cache)
    else:
        convert(str(cache), str(tmp_path / "whole"), format="zarr", num_workers=1)
        whole = files(tmp_path / "whole")
    rng = random.Random(3)
    to = tmp_path / "to"
    for victim in ("worker", "parent") if form == "zarr" else ("parent",):
        with subprocess.Popen(command(source, to, form, 2), stderr=subprocess.PIPE) as process:
            wait_for_shards(process, to, 2 + len(list(to.glob("index/*.parquet"))))
            time.sleep(rng.uniform(0, 0.05))
            children = [
                p
                for p in psutil.Process(process.pid).children()
                if "resource_tracker" not in " ".join(p.cmdline())
            ]
            if victim == "worker":
                children[0].kill()
            else:
                process.kill()
            _, err = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        if victim == "worker":
            assert process.returncode == 2
            assert b"a process that converts shards has died" in err
            assert b"Traceback" not in err
        committed = files(to)
        for name in committed.keys() & whole.keys():
            if name.startswith("index/"):
                assert committed[name] == whole[name]
    convert(str(source), str(to), format=form, num_workers=1)  # type: ignore[arg-type]
    assert files(to) == whole


def test_a_signal_ends_all_processes_with_its_message(cache: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    with subprocess.Popen(command(cache, to, "zarr", 2), stderr=subprocess.PIPE) as process:
        wait_for_shards(process, to, 1)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"stopped by SIGTERM; what is committed stays" in err
    assert b"Traceback" not in err
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_ctrl_c_means_nothing_to_a_process_that_is_about_to_start(
    cache: Path, tmp_path: Path
) -> None:
    """It goes to all; it is for the parent to say so and to end them."""
    to = tmp_path / "to"
    with subprocess.Popen(command(cache, to, "zarr", 2), stderr=subprocess.PIPE) as process:
        about_to_start(process)[0].send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"Traceback" not in err
    assert len(dspark.open_cache(to)) == 200


def about_to_start(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The first process of a conversion, as soon as it is there."""
    found: list[psutil.Process] = []
    while process.poll() is None and not found:
        time.sleep(0.001)
        children = psutil.Process(process.pid).children()
        found = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
    return found


def test_a_signal_does_not_wait_for_a_process_that_is_about_to_start(
    cache: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    with subprocess.Popen(command(cache, to, "zarr", 2), stderr=subprocess.PIPE) as process:
        children = about_to_start(process)
        children[0].suspend()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err.count(b"stopped by SIGTERM") == 1
    assert b"Traceback" not in err
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_shard_that_another_process_writes_is_left_to_it(cache: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    convert(str(cache), str(to), format="zarr", only="0", num_workers=1)
    with Claim(CachePaths(to, 8).shard(5)):
        report = convert(str(cache), str(to), format="zarr", num_workers=1)
    assert (report.converted, report.missing) == (6, (5,))
    assert convert(str(cache), str(to), format="zarr", num_workers=1).converted == 1
    assert dspark.verify_cache(to, deep=True).exit_code == 0
