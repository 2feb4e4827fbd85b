"""``capture --format zarr``: the bytes of a conversion, whatever happens on the way."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows

import dspark
from dspark.capture import zarr_writer
from dspark.convert.run import convert
from dspark.reports.capture import capture as report_text
from dspark.schemas import copy_shard
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.verify.repair import repair_cache

Inputs = dict[str, str]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def inputs(tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    data = write_rows(tmp_path_factory.mktemp("zarr") / "d.parquet", mixed_rows(20))
    return {"target": str(tiny_target("qwen2_5_vl")), "data": str(data), "logits": "head"}


@pytest.fixture(scope="module")
def caches(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Captured as safetensors and extended; the same converted."""
    folder = tmp_path_factory.mktemp("caches")
    hot, cold = folder / "hot", folder / "cold"
    dspark.capture(3, out=str(hot), layers="0", **inputs)  # type: ignore[arg-type]
    shutil.copytree(hot, folder / "first")
    dspark.capture(out=str(hot), extend=True, layers="1")
    convert(str(hot), str(cold), format="zarr", num_workers=1)
    return hot, cold


def test_a_captured_cache_equals_a_converted_one(
    inputs: Inputs, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    """First files and added ones; and the way back to what was never converted."""
    out = str(tmp_path / "c")
    report = dspark.capture(3, out=out, layers="0", format="zarr", **inputs)  # type: ignore[arg-type]
    assert report is not None and " before compression); " in report_text(report)
    report = dspark.capture(3, out=out, layers="0", format="zarr", **inputs)  # type: ignore[arg-type]
    assert report is not None and report.shards_written == 0
    dspark.capture(out=out, extend=True, layers="1")
    assert files(tmp_path / "c") == files(caches[1])
    convert(out, str(tmp_path / "back"), format="safetensors", num_workers=1)
    assert files(tmp_path / "back") == files(caches[0])


def test_smaller_forms_are_captured_as_they_are_converted(inputs: Inputs, tmp_path: Path) -> None:
    given = {"layers": "0", "dtype": "fp8", "embeds": "pictures", **inputs}
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    for out, form in ((hot, "safetensors"), (cold, "zarr")):
        dspark.capture(2, out=str(out), format=form, **given)  # type: ignore[arg-type]
        dspark.capture(out=str(out), extend=True, layers="1")
    convert(str(hot), str(tmp_path / "converted"), format="zarr", num_workers=1)
    assert files(cold) == files(tmp_path / "converted")
    convert(str(cold), str(tmp_path / "back"), format="safetensors", num_workers=1)
    assert files(tmp_path / "back") == files(hot)


STEPS = ["_write_object", "fsync_dir", "write_file"]


@pytest.mark.parametrize("step", STEPS)
def test_stopped_while_a_group_is_written(
    inputs: Inputs,
    caches: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    out = tmp_path / "c"
    options = {"out": str(out), "layers": "0", "format": "zarr", **inputs}
    real, calls = getattr(copy_shard, step), 0

    def stopping(*given: object) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 5, 20):
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(copy_shard, step, stopping)
    stops = 0
    while stops < 4:
        try:
            dspark.capture(3, **options)  # type: ignore[arg-type]
            break
        except KeyboardInterrupt:
            stops += 1
            assert not list(out.rglob("*.tmp"))
    assert 1 <= stops < 4
    monkeypatch.undo()
    dspark.capture(out=str(out), extend=True, layers="1")
    assert files(out) == files(caches[1])


def test_killed_while_a_group_is_written(
    inputs: Inputs, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "c"
    command = [sys.executable, "-m", "dspark.cli", "capture", "--shards", "3", "--out", str(out)]
    command += ["--format", "zarr", "--layers", "0"]
    for name, value in inputs.items():
        command += [f"--{name}", value]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not any(out.glob("shards/*.zarr/*/c.*")):
            time.sleep(0.0005)
        process.kill()
    with pytest.raises(IncompatibleCacheError, match="not finished"):
        dspark.open_cache(out)
    dspark.capture(3, out=str(out), layers="0", format="zarr", **inputs)  # type: ignore[arg-type]
    dspark.capture(out=str(out), extend=True, layers="1")
    assert files(out) == files(caches[1])


def test_a_cache_has_one_form(inputs: Inputs, caches: tuple[Path, Path]) -> None:
    before = files(caches[0]), files(caches[1])
    given = {"layers": "0", **inputs}
    with pytest.raises(IncompatibleCacheError, match="in safetensors form.*--format safetensors"):
        dspark.capture(3, out=str(caches[0]), format="zarr", **given)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleCacheError, match="in zarr form.*--format zarr"):
        dspark.capture(3, out=str(caches[1]), **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="in zarr form.*leave --format out"):
        dspark.capture(out=str(caches[1]), extend=True, layers="2", format="safetensors")
    assert (files(caches[0]), files(caches[1])) == before


def test_a_repaired_conversion_is_captured_again_with_its_codec(
    inputs: Inputs, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    cold = tmp_path / "cold"
    convert(str(caches[0]), str(cold), format="zarr", codec="lz4", level=2, num_workers=1)
    whole = files(cold)
    (CachePaths(cold, 3).group(1) / "input_ids" / "c.0.0").unlink()
    repair_cache(dspark.verify_cache(cold))
    assert not CachePaths(cold, 3).group(1).exists()
    dspark.capture(3, out=str(cold), layers="0", format="zarr", **inputs)  # type: ignore[arg-type]
    assert files(cold) == whole


def test_a_cache_with_fewer_fields_is_not_continued(
    inputs: Inputs, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    convert(str(caches[0]), str(small), format="zarr", fields="hidden_states.1", num_workers=1)
    before = files(small)
    with pytest.raises(IncompatibleCacheError, match="fields: .*there, not given now"):
        dspark.capture(3, out=str(small), layers="0", format="zarr", **inputs)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleCacheError, match="fields: "):
        dspark.capture(out=str(small), extend=True, layers="0")
    assert files(small) == before


def test_overwrite_deletes_groups(
    inputs: Inputs, caches: tuple[Path, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(caches[1], tmp_path / "c")
    stray = CachePaths(out, 3).group(0) / "input_ids" / "notes.txt"
    stray.write_text("mine")
    given = {"out": str(out), "layers": "0", "overwrite": True, **inputs}
    with pytest.raises(InputError, match="notes.txt is not of a capture"):
        dspark.capture(3, **given)  # type: ignore[arg-type]
    stray.unlink()
    assert files(out) == files(caches[1])
    dspark.capture(3, **given)  # type: ignore[arg-type]
    assert files(out) == files(caches[0].parent / "first")
    assert {p.suffix for p in (out / "shards").iterdir()} == {".safetensors"}


def test_extension_is_overwritten_in_this_form(
    caches: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(caches[1], tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(zarr_writer, "write_zarr", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dspark.capture(out=str(out), extend=True, layers="2")
    assert read_manifest(out).extensions[1].complete is False
    dspark.capture(out=str(out), extend=True, logits="topk:3", overwrite=True)
    assert dspark.verify_cache(out, deep=True).exit_code == 0
    assert read_manifest(out).best_logits == "topk:3"
