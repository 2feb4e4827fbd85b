"""A cache whose manifest is lost: continued with the same settings, not replaced with others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conversation_data import mixed_rows, write_rows
from test_resume import digests

import dspark
from dspark.schemas.errors import InputError


@pytest.fixture
def options(tiny_target: Callable[[str], Path], tmp_path: Path) -> dict:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(8))
    return {
        "target": str(tiny_target("llava")),
        "data": str(data),
        "out": str(tmp_path / "c"),
        "device": "cpu",
    }


def test_other_settings_do_not_replace_its_shards(options: dict, tmp_path: Path) -> None:
    root = tmp_path / "c"
    dspark.capture(2, **options)
    whole = digests(root)
    (root / "manifest.json").unlink()
    without = digests(root)
    for shards, change in ((2, {"dtype": "fp32"}), (4, {}), (2, {"limit": 4})):
        with pytest.raises(InputError, match="no manifest, but shards of a capture with other"):
            dspark.capture(shards, **{**options, **change})
        assert digests(root) == without
    assert dspark.capture(2, **options).shards_written == 0
    assert digests(root) == whole


@pytest.mark.parametrize("left", ["no manifest", "a cut manifest", "only target/"])
def test_overwrite_takes_what_is_left(options: dict, tmp_path: Path, left: str) -> None:
    root = tmp_path / "c"
    dspark.capture(2, **options)
    manifest = root / "manifest.json"
    if left == "a cut manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        manifest.unlink()
    if left == "only target/":
        for path in (*(root / "shards").iterdir(), *(root / "index").iterdir()):
            path.unlink()
        (root / "target" / "head.safetensors").unlink()
    report = dspark.capture(2, **options, dtype="fp32", overwrite=True)
    assert report.shards_written == 2 and report.manifest.dtype == "fp32"


def test_a_cache_is_not_made_inside_another(options: dict, tmp_path: Path) -> None:
    dspark.capture(2, **options)
    for inner in ("inner", "shards/inner"):
        with pytest.raises(InputError, match="it lies inside the cache"):
            dspark.capture(2, **{**options, "out": str(tmp_path / "c" / inner)})
        assert not (tmp_path / "c" / inner).exists()


def test_what_file_systems_leave_is_no_obstacle(options: dict, tmp_path: Path) -> None:
    (tmp_path / "c" / "lost+found").mkdir(parents=True)
    (tmp_path / "c" / ".snapshot").mkdir()
    assert dspark.capture(2, **options).shards_written == 2
    assert dspark.capture(2, **options, overwrite=True).shards_written == 2
