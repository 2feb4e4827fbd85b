"""Rendering processes, writer threads and background commits change no byte and lose no error."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest
from conversation_data import assistant, mixed_rows, row, text, user, write_rows

import dspark
from dspark.capture.conversations import Conversations
from dspark.capture.rendering.pool import RenderingPool
from dspark.capture.targets.processor import EncodesRows
from dspark.schemas.errors import InputError, StoppedError

SHARDS = 4
ROWS = 40


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in root.rglob("*")
        if p.is_file()
    }


@pytest.fixture(scope="module")
def inputs(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    rows = mixed_rows(ROWS)
    rows[3] = row(3, [user(text("Hi"))])  # skipped
    rows[21] = row(21, [user(text("x" * 600)), assistant("y")])  # skipped
    data = write_rows(tmp_path_factory.mktemp("data") / "d.parquet", rows)
    return {"target": str(tiny_target("qwen2_5_vl")), "data": str(data)}


@pytest.fixture(scope="module")
def alone(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a capture without rendering processes."""
    out = tmp_path_factory.mktemp("alone") / "c"
    dspark.capture(SHARDS, **inputs, out=str(out), batch_tokens=300, num_workers=0)
    return digests(out)


def start(inputs: dict[str, str], out: Path, *more: str) -> "subprocess.Popen[str]":
    given = [f"--{name}={value}" for name, value in inputs.items()]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "dspark", "capture", f"--shards={SHARDS}", f"--out={out}"),
            *("--batch-tokens=300", *given, *more),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def renderers(process: "subprocess.Popen[str]", count: int) -> list[psutil.Process]:
    """The rendering processes, once they are there and a shard is being written."""
    deadline = time.monotonic() + 60
    children: list[psutil.Process] = []
    while len(children) < count and process.poll() is None and time.monotonic() < deadline:
        children = psutil.Process(process.pid).children()
        time.sleep(0.001)
    assert len(children) == count
    return children


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_rendering_processes_gives_the_same_bytes(
    inputs: dict[str, str], alone: dict[str, str], tmp_path: Path, workers: int
) -> None:
    out = tmp_path / "c"
    done = dspark.capture(SHARDS, **inputs, out=str(out), batch_tokens=300, num_workers=workers)
    assert digests(out) == alone
    assert done.shards_written == SHARDS
    assert done.bytes_written == sum(
        sum(t.nbytes for t in dspark.open_cache(out)[i].values()) for i in range(ROWS)
    )
    assert not [p for p in psutil.Process().children() if "dspark" in p.name()]


def test_a_killed_rendering_process_ends_the_capture_with_a_sentence(
    inputs: dict[str, str], alone: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "c"
    process = start(inputs, out, "--num-workers=2")
    first, second = renderers(process, 2)
    first.kill()
    _, said = process.communicate(timeout=60)
    lines = [line for line in said.splitlines() if line.startswith("dspark:")]
    assert process.returncode == 2, said
    assert (
        len(lines) == 1 and "a process that renders rows has died (killed by SIGKILL)" in lines[0]
    )
    assert not second.is_running()
    assert not list(out.rglob("*.tmp"))
    dspark.capture(SHARDS, **inputs, out=str(out), batch_tokens=300, num_workers=1)
    assert digests(out) == alone


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rendering_process_outlives_the_capture(
    inputs: dict[str, str], tmp_path: Path, how: signal.Signals
) -> None:
    process = start(inputs, tmp_path / "c", "--num-workers=2")
    children = renderers(process, 2)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.kill()
    _, said = process.communicate(timeout=60)  # ends when nobody holds stderr any more
    assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how), said
    assert psutil.wait_procs(children, timeout=10)[1] == []
    if how != signal.SIGKILL:
        assert said.splitlines()[-1].startswith(f"dspark: stopped by {how.name}")


def test_a_pool_is_left_while_one_of_its_threads_is_about_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which ``threading`` tells already; to wait for it would fail."""
    about_to_start = threading.Thread()
    threads = threading.enumerate
    seen: list[list[threading.Thread]] = []

    def telling() -> list[threading.Thread]:
        seen.append(threads() + [about_to_start] * len(seen))
        return seen[-1]

    monkeypatch.setattr(threading, "enumerate", telling)
    with RenderingPool(1, cast(Conversations, None), cast(EncodesRows, None)):
        assert about_to_start in seen[-1]
    assert {*threads()} == {*seen[0]}


def test_a_signal_while_the_pool_starts_leaves_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is held meanwhile, and comes before there is a block to leave."""

    @contextmanager
    def signals_held() -> Iterator[None]:
        yield
        raise StoppedError(signal.SIGINT)

    monkeypatch.setattr("dspark.capture.rendering.pool.signals_held", signals_held)
    threads = {*threading.enumerate()}
    pool = RenderingPool(2, cast(Conversations, None), cast(EncodesRows, None))
    with pytest.raises(StoppedError), pool:
        pass
    assert {*threading.enumerate()} == threads
    assert multiprocessing.active_children() == []


def test_what_a_rendering_process_refuses_is_told_as_ever(
    inputs: dict[str, str], tmp_path: Path
) -> None:
    for workers in (0, 2):
        out = tmp_path / str(workers)
        with pytest.raises(InputError, match=r"row 3, id 'row-3', cannot be captured \(no ass"):
            dspark.capture(SHARDS, **inputs, out=str(out), num_workers=workers, on_bad_row="error")
