"""Any number of workers, stopped anywhere and continued by any other number: the same bytes."""

import hashlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows
from torchrun import SHARDS, finish, kill_all, options, run, start, wait_until, workers_of

import dspark
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import read_manifest


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def inputs(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    data = write_rows(tmp_path_factory.mktemp("data") / "d.parquet", mixed_rows(90))
    return tiny_target("qwen2_5_vl"), data


@pytest.fixture(scope="module")
def whole(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of an undisturbed capture by one process."""
    out = tmp_path_factory.mktemp("whole") / "cache"
    code, _, err = run(1, *options(*inputs, out))
    assert code == 0, err
    return digests(out)


def committed(out: Path) -> int:
    return len(list((out / "index").glob("*.parquet")))


def writing(out: Path) -> int:
    return len(list((out / "shards").glob("*.tmp")))


def test_two_workers_speak_with_one_voice(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    code, said, err = run(2, *options(*inputs, out))
    assert code == 0, err
    assert digests(out) == whole
    assert said.count(f"in {SHARDS} shards ({SHARDS} written now") == 1
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("capture: 100%")
    assert "90/90 [" in last and f"{SHARDS}/{SHARDS} shards" in last
    assert err.count("capture: 100%") == 1


def test_killed_with_two_continued_with_one_then_three(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    for workers, shards in ((2, 1), (1, 3)):
        job = start(workers, *options(*inputs, out))
        wait_until(lambda shards=shards: committed(out) >= shards and writing(out), job)
        assert job.poll() is None, job.communicate()
        kill_all(job)
        assert shards <= committed(out) < SHARDS
    code, _, err = run(3, *options(*inputs, out))
    assert code == 0, err
    assert digests(out) == whole


def test_a_killed_worker_ends_the_job_at_once(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    job = start(2, *options(*inputs, out))
    wait_until(lambda: committed(out) >= 1 and writing(out) >= 2, job)
    victim = workers_of(job)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code, said, err = finish(job)
    assert time.monotonic() - killed < 30
    assert code == 1 and not said
    ours = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("dspark:")]
    assert len(ours) == 1 and "stopped by SIGTERM" in ours[0]
    assert f"pid: {victim}" in err and "SIGKILL" in err
    assert committed(out) < SHARDS
    code, _, err = run(1, *options(*inputs, out))
    assert code == 0, err
    assert digests(out) == whole


def test_torchrun_restarts_the_workers(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    job = start(2, *options(*inputs, out), restarts=1)
    wait_until(lambda: committed(out) >= 1, job)
    os.kill(workers_of(job)[0], signal.SIGKILL)
    code, said, err = finish(job)
    assert code == 0, err
    assert "written now" in said
    assert digests(out) == whole


def test_a_wrong_option_is_said_once(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    target, data = inputs
    wrong = options(target, data, tmp_path / "cache", "--layers", "99")
    code, said, err = run(2, *wrong)
    assert code == 1 and not said
    assert err.startswith("dspark: --layers 99: the target has")
    told, torchruns = err.split("Root Cause")
    assert told.count("dspark: ") == 1 and "--layers 99: the target has" in torchruns


def test_jobs_share_shards_by_number_and_the_last_one_completes_the_cache(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    first = start(1, *options(*inputs, out, "--only", "0,2-3"))
    second = start(1, *options(*inputs, out, "--only", "4,1"))
    for job in (first, second):
        code, said, err = finish(job)
        assert code == 0, err
        assert "left to other jobs" in said
    assert committed(out) == 5
    assert not read_manifest(out).complete
    code, said, err = run(1, *options(*inputs, out, "--only", "5"))
    assert code == 0 and "(1 written now" in said, err
    assert digests(out) == whole


def test_two_jobs_on_the_same_shards_do_no_harm(
    inputs: tuple[Path, Path], whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    both = [start(1, *options(*inputs, out)) for _ in range(2)]
    said = []
    for job in both:
        code, words, err = finish(job)
        assert code == 0, err
        said.append(words)
    assert digests(out) == whole
    written = re.findall(r"(\d+)(?: shards)? written now", "".join(said))
    assert sum(map(int, written)) == SHARDS


@pytest.mark.parametrize("only", ["6", "x", "3-1", "1,,2", ""])
def test_only_names_shards_that_exist(inputs: tuple[Path, Path], tmp_path: Path, only: str) -> None:
    with pytest.raises(InputError, match="--only"):
        dspark.capture(SHARDS, out=str(tmp_path / "c"), only=only)
    assert not (tmp_path / "c").exists()


def test_a_restart_does_not_overwrite_again(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = inputs
    given = {"target": str(target), "data": str(data), "out": str(tmp_path / "c"), "limit": 4}
    assert dspark.capture(2, **given, overwrite=True).shards_written == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert dspark.capture(2, **given, overwrite=True).shards_written == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert dspark.capture(2, **given, overwrite=True).shards_written == 2
