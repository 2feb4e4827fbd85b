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


def test_stopped_and_continued(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    target, data = inputs
    options = {"target": str(target), "data": str(data), "batch_tokens": 300}
    dspark.capture(SHARDS, **options, out=str(tmp_path / "whole"))
    out = tmp_path / "stopped"
    for shards, how, code in ((1, signal.SIGINT, 130), (3, signal.SIGTERM, 143)):
        process = subprocess.Popen(
            command(target, data, out), stderr=subprocess.PIPE, text=True, env=os.environ
        )
        stop_after(process, out, shards, how)
        assert process.stderr is not None
        said = process.stderr.read().replace("\r", "\n").splitlines()
        assert process.returncode == code, "\n".join(said)
        assert f"dspark: stopped by {how.name}; what is committed stays" in said[-1], "\n".join(
            said
        )
        assert shards <= committed(out) < SHARDS
        with pytest.raises(InputError, match="not finished"):
            dspark.open_cache(out)
    before = {p: p.stat().st_mtime_ns for p in (out / "shards").glob("*.safetensors")}
    dspark.capture(SHARDS, **options, out=str(out))
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


def test_what_does_not_belong_to_the_target_is_not_kept_beside_it(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """As a first run with another target leaves, if it dies before it has a manifest."""
    target, data = inputs
    out = tmp_path / "c"
    other = out / "target" / "merges.txt"
    other.parent.mkdir(parents=True)
    other.touch()
    options = {"target": str(target), "data": str(data), "out": str(out), "limit": 4}
    with pytest.raises(InputError, match=r"merges\.txt: not a file of this target"):
        dspark.capture(2, **options)
    other.unlink()
    assert dspark.capture(2, **options).shards_written == 2


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
    """Each index says what it belongs to."""
    target, data = inputs
    options = {"target": str(target), "data": str(data), "limit": 4}
    for name, tokens in (("c", 1), ("d", 900)):
        dspark.capture(2, **options, out=str(tmp_path / name), batch_tokens=tokens)
    whole = digests(tmp_path / "d")
    for folder in ("shards", "index"):
        for path in (tmp_path / "c" / folder).glob("*00001-of*"):
            shutil.copy(path, tmp_path / "d" / folder / path.name)
    report = dspark.capture(2, **options, out=str(tmp_path / "d"), batch_tokens=900)
    assert report.shards_written == 1
    assert digests(tmp_path / "d") == whole


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
        dspark.open_cache(tmp_path / "c")[2]
    with pytest.raises(InputError, match="00001-of-00002.parquet: it belongs to a capture with"):
        dspark.train_draft(tmp_path / "c", "msd", tmp_path / "draft", steps=2, eval_fraction=0)
