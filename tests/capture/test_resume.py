"""A capture that was stopped, however, continues to the same bytes."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows

import dspark
from dspark.schemas.errors import InputError

SHARDS = 6


def command(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "dspark", "capture", "--shards", str(SHARDS)),
        *("--target", str(target), "--data", str(data), "--out", str(out)),
        *("--batch-tokens", "300", *more),
    ]


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def committed(out: Path) -> int:
    return len(list((out / "index").glob("*.parquet")))


def stop_after(process: subprocess.Popen[str], out: Path, shards: int, how: signal.Signals) -> None:
    """Signal the process as soon as so many shards are committed and another is being written."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if committed(out) >= shards and list((out / "shards").glob("*.tmp")):
            break
        time.sleep(0.001)
    process.send_signal(how)
    process.wait(timeout=60)


@pytest.fixture
def inputs(tiny_target: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    return tiny_target("qwen2_5_vl"), write_rows(tmp_path / "d.parquet", mixed_rows(90))


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopped_and_continued(
    inputs: tuple[Path, Path], tmp_path: Path, how: signal.Signals, code: int
) -> None:
    target, data = inputs
    dspark.capture(
        SHARDS, target=str(target), data=str(data), out=str(tmp_path / "whole"), batch_tokens=300
    )
    out = tmp_path / "stopped"
    stops = 0
    for shards in (1, 3):
        process = subprocess.Popen(
            command(target, data, out), stderr=subprocess.PIPE, text=True, env=os.environ
        )
        stop_after(process, out, shards, how)
        if process.returncode == 0:
            break
        stops += 1
        assert process.returncode == code
        assert process.stderr is not None
        said = process.stderr.read().splitlines()[-1:]
        assert how != signal.SIGINT or "dspark: stopped; what is committed stays" in said[0]
        assert committed(out) < SHARDS
        with pytest.raises(InputError, match="not finished"):
            dspark.open_cache(out)
        before = {p: p.stat().st_mtime_ns for p in (out / "shards").glob("*.safetensors")}
    assert stops >= 1, "every run finished before it could be stopped"
    finished = subprocess.run(command(target, data, out), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    for path, mtime in before.items():
        assert path.stat().st_mtime_ns == mtime, "a committed shard was written again"
    assert digests(out) == digests(tmp_path / "whole")


def test_a_finished_cache_is_left_alone(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    target, data = inputs
    options = {"target": str(target), "data": str(data), "out": str(tmp_path / "c"), "limit": 4}
    assert dspark.capture(2, **options).shards_written == 2
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")}
    again = dspark.capture(2, **options)
    assert again.shards_written == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*")} == before


def test_what_is_cut_or_lost_is_made_again(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    target, data = inputs
    out = tmp_path / "c"
    options = {"target": str(target), "data": str(data), "out": str(out), "limit": 4}
    dspark.capture(2, **options)
    whole = digests(out)
    first, second = sorted((out / "shards").iterdir())
    os.truncate(first, 5000)
    second.unlink()
    (out / "target" / "head.safetensors").unlink()
    assert dspark.capture(2, **options).shards_written == 2
    assert digests(out) == whole
    shutil.rmtree(out / "target")
    assert dspark.capture(2, **options).shards_written == 0
    assert digests(out) == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "fp32"}, "dtype: 'bf16' there, 'fp32' now"),
        ({"max_length": 256}, "max_length: 512 there, 256 now"),
        ({"layers": "1"}, "layers: "),
        ({"limit": 5}, "num_samples: 4 there, 5 now"),
    ],
)
def test_other_settings_are_refused(
    inputs: tuple[Path, Path], tmp_path: Path, change: dict, words: str
) -> None:
    target, data = inputs
    options = {"target": str(target), "data": str(data), "out": str(tmp_path / "c"), "limit": 4}
    dspark.capture(2, **options)
    before = digests(tmp_path / "c")
    with pytest.raises(InputError, match="other settings") as error:
        dspark.capture(2, **{**options, **change})
    assert words in str(error.value)
    assert digests(tmp_path / "c") == before


def test_other_weights_and_other_data_are_refused(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    target, data = inputs
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    options = {"out": str(tmp_path / "c"), "limit": 4}
    dspark.capture(2, target=str(copy), data=str(data), **options)
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="target: "):
        dspark.capture(2, target=str(copy), data=str(data), **options)
    other = write_rows(tmp_path / "other.parquet", mixed_rows(90, seed=1))
    with pytest.raises(InputError, match="data: "):
        dspark.capture(2, target=str(target), data=str(other), **options)


def test_a_shard_of_other_settings_is_not_taken_over(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without a manifest to compare with, each index still says what it belongs to."""
    target, data = inputs
    options = {"target": str(target), "data": str(data), "limit": 4}
    dspark.capture(2, **options, out=str(tmp_path / "c"), batch_tokens=1)
    (tmp_path / "c" / "manifest.json").unlink()
    report = dspark.capture(2, **options, out=str(tmp_path / "c"), batch_tokens=900)
    assert report.shards_written == 2
    dspark.capture(2, **options, out=str(tmp_path / "d"), batch_tokens=900)
    assert digests(tmp_path / "c") == digests(tmp_path / "d")


def test_an_index_of_other_settings_is_not_trained_on(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    target, data = inputs
    options = {"target": str(target), "data": str(data), "limit": 4}
    for name, tokens in (("c", 1), ("d", 900)):
        dspark.capture(2, **options, out=str(tmp_path / name), batch_tokens=tokens)
    for folder in ("shards", "index"):
        for path in (tmp_path / "d" / folder).glob("*00001-of*"):
            shutil.copy(path, tmp_path / "c" / folder / path.name)
    with pytest.raises(InputError, match="other settings than the manifest's"):
        dspark.open_cache(tmp_path / "c")
