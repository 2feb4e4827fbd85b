"""Damage of zarr groups: named by file, shard, row and field; taken out; made again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import into_folder, lock_out
from flipped_bytes import xor_byte
from synthetic_cache import add_extension, write_cache

import dspark
from dspark.convert.run import convert
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.stored_shard import zarr_layout
from dspark.verify.compare import compare_rows
from dspark.verify.repair import Repair, repair_cache

GROUP = "shards/shard-00001-of-00003.zarr"
OBJECT = f"{GROUP}/inputs_embeds/c.0.0.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    cache = write_cache(folder / "cache", samples=60, layers=(0,))
    add_extension(cache, layers=(3,))
    convert(str(cache), str(folder / "z"), format="zarr", num_workers=1)
    return folder / "z"


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "c")


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": (OBJECT, Path.unlink, "cannot be read (No such file or directory)"),
    "empty": (OBJECT, lambda p: p.write_bytes(b""), "shorter than its index"),
    "cut": (OBJECT, lambda p: os.truncate(p, p.stat().st_size - 1), "its index does not have"),
    "cut in front": (OBJECT, lambda p: p.write_bytes(p.read_bytes()[1:]), "no chunk"),
    "longer": (OBJECT, lambda p: p.write_bytes(b"\0" + p.read_bytes()), "no chunk"),
    "folder": (OBJECT, into_folder, "not a file"),
    "group": (f"{GROUP}/zarr.json", Path.unlink, "cannot be read (No such file"),
    "metadata": (f"{GROUP}/inputs_embeds/zarr.json", lambda p: xor_byte(p, 9, 1), "metadata"),
    "an extension's": (
        "shards/shard-00001-of-00003.plus1.zarr/hidden_states.3/c.0.0.0",
        Path.unlink,
        "cannot be read (No such file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_is_named_without_reading_the_rows(cache: Path, made: Path, damage: str) -> None:
    file, harm, problem = DAMAGES[damage]
    harm(cache / file)
    found = dspark.verify_cache(cache)
    assert [(f.file, f.shard) for f in found.faults] == [(file, 1)]
    assert problem in found.faults[0].problem
    assert found.exit_code == 1
    assert [f.file for f in dspark.verify_cache(cache, deep=True).faults] == [file]
    if damage == "folder":
        return
    repaired = repair_cache(found)
    taken = CachePaths(cache, 3, int("plus" in file))
    assert not taken.group(1).exists() and not taken.index(1).exists()
    assert not list(cache.rglob("*.tmp"))
    if taken.part:
        assert repaired == Repair(files=("shards/shard-00001-of-00003.plus1.zarr",))
    else:
        assert repaired == Repair(shards=(1,))
    source = made.parent / "cache"
    assert convert(str(source), str(cache), format="zarr", num_workers=1).converted == 1
    assert dspark.verify_cache(cache, deep=True).exit_code == 0


def test_each_flipped_byte_is_named(cache: Path) -> None:
    """A row's by row and field, whatever the object; one of the index by its object."""
    manifest = read_manifest(cache)
    rng = np.random.default_rng(0)
    for name, array in zarr_layout(manifest).arrays.items():
        path = CachePaths(cache, 3).group(2) / array.object
        chunks = path.stat().st_size - array.index_bytes
        for offset in (int(rng.integers(chunks)), int(rng.integers(chunks, path.stat().st_size))):
            mask = 1 << int(rng.integers(8))
            xor_byte(path, offset, mask)
            faults = dspark.verify_cache(cache, deep=True).faults
            xor_byte(path, offset, mask)
            assert {f.file for f in faults} == {str(path.relative_to(cache))}
            if offset < chunks:
                assert [f.field for f in faults] == [name]
                assert faults[0].sample in manifest.rows_of(2)
                assert "checksum" in faults[0].problem
    assert dspark.verify_cache(cache, deep=True).exit_code == 0


def test_what_cannot_be_read_may_be_sound(cache: Path) -> None:
    lock_out(cache / OBJECT)  # a link to itself
    found = dspark.verify_cache(cache)
    assert (found.faults, found.exit_code) == ((), 2)
    assert [f.file for f in found.unreadable] == [OBJECT]


def test_a_file_that_is_not_of_the_group_is_noted(cache: Path) -> None:
    (cache / GROUP / "c").write_text("x")
    found = dspark.verify_cache(cache, deep=True)
    assert found.exit_code == 0
    assert found.notes == (f"{GROUP}/c: no part of the cache",)


def test_rows_are_compared_with_their_recapture(cache: Path) -> None:
    """As ``verify --against`` does it, here with the rows themselves, one of them changed."""
    opened = dspark.open_cache(cache)
    rows = {4: opened[4], 30: opened[30]}
    rows[30]["hidden_states.3"] = rows[30]["hidden_states.3"] + 1
    lengths = {sample: len(row["input_ids"]) for sample, row in rows.items()}
    compared = compare_rows(cache, read_manifest(cache), lengths, rows.items())
    assert [(f.sample, f.field) for f in compared.faults] == [(30, "hidden_states.3")]
    assert compared.faults[0].file == "shards/shard-00001-of-00003.plus1.zarr"
    assert [f.name for f in compared.fields if not f.equal] == ["hidden_states.3"]
