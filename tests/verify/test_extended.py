"""Damage in the files of added fields is found, named, and taken out alone."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from damage import cut, into_folder, spoil
from flipped_bytes import xor_byte
from rights import no_rights
from synthetic_cache import add_extension, write_cache

import dspark
from dspark.reports.verification import document, next_steps
from dspark.schemas.claims import Claim
from dspark.schemas.errors import InputError, UnreadableError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, manifest_path
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify.repair import Repair, repair_cache


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    root = write_cache(tmp_path / "cache", layers=(2,), position_rows=3)
    add_extension(root, layers=(0, 4))
    return root


@pytest.fixture
def plus(cache: Path) -> CachePaths:
    return CachePaths(cache, 3, 1)


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def commands(root: Path) -> list[str]:
    steps = next_steps(dspark.verify_cache(root))
    lines = (line for line in steps.splitlines() if line.startswith("then: "))
    return [line.removeprefix("then: ") for line in lines]


def test_sound(cache: Path) -> None:
    add_extension(cache, logits="topk:3")
    found = dspark.verify_cache(cache, deep=True)
    assert (found.faults, found.notes, found.exit_code) == ((), (), 0)
    manifest = read_manifest(cache)
    real = manifest.counts.tokens * sum(f.token_bytes for f in manifest.all_fields)
    assert found.bytes_read == real + sum(f.bytes for f in manifest.target_files.values())
    assert commands(cache) == []


def test_each_flip_in_a_real_token_is_named(cache: Path, plus: CachePaths) -> None:
    part = read_manifest(cache).parts[1]
    layout = ShardLayout(part.fields, part.rows_per_shard)
    rng = random.Random(0)
    for _ in range(12):
        shard, field = rng.randrange(3), rng.choice(part.fields)
        rows = read_index(plus, part, shard)[0].to_pylist()
        entry = rng.choice([row for row in rows if row["length"]])
        offset, size = layout.row_extents(field, entry["row"], entry["length"])[0]
        at, mask = offset + rng.randrange(size), rng.randrange(1, 256)
        xor_byte(plus.shard(shard), at, mask)
        (fault,) = dspark.verify_cache(cache, deep=True).faults
        assert (fault.file, fault.sample, fault.field, fault.part) == (
            str(plus.shard(shard).relative_to(cache)),
            entry["sample"],
            field.name,
            1,
        )
        xor_byte(plus.shard(shard), at, mask)


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    [
        ("shards", Path.unlink, "No such file"),
        ("shards", cut, "bytes long"),
        ("shards", spoil, "its header is not the one"),
        ("shards", into_folder, "not a file"),
        ("index", Path.unlink, "missing, so its shard does not count"),
        ("index", cut, "no sound sample index"),
    ],
)
def test_the_shallow_check_names_the_file(
    cache: Path, folder: str, change: Callable[[Path], None], words: str
) -> None:
    (path,) = (cache / folder).glob("shard-00001-*.plus1.*")
    change(path)
    (fault,) = dspark.verify_cache(cache).faults
    assert str(fault).startswith(f"{path.relative_to(cache)}: ")
    assert words in str(fault)
    assert (fault.shard, fault.part) == (1, 1)
    assert commands(cache) == [f"dspark capture --extend --layers 0,4 --out {cache} --device cpu"]


def test_an_index_must_list_the_rows_of_the_first_one(cache: Path, plus: CachePaths) -> None:
    part = read_manifest(cache).parts[1]
    table, facts = read_index(plus, part, 0)
    rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist()]
    rows[0] = replace(rows[0], id="another")
    write_index(plus.index(0), rows, facts)
    (fault,) = dspark.verify_cache(cache).faults
    assert fault.problem == "its rows are not those of the shard's first index"


def test_a_repair_takes_out_the_added_files_alone(cache: Path, plus: CachePaths) -> None:
    before = digests(cache)
    cut(plus.shard(2))
    spoil(plus.index(1))
    with Claim(plus.shard(1)):
        repaired = repair_cache(dspark.verify_cache(cache))
    name = str(plus.shard(2).relative_to(cache))
    assert repaired == Repair((), (name,), (1,))
    repair_cache(dspark.verify_cache(cache))
    left = digests(cache)
    gone = {str(f(i).relative_to(cache)) for f in (plus.shard, plus.index) for i in (1, 2)}
    assert before.keys() - left.keys() == gone
    assert {n for n in left if left[n] != before[n]} == {"manifest.json"}
    manifest = read_manifest(cache)
    assert manifest.complete
    assert not manifest.extensions[0].complete
    found = dspark.verify_cache(cache, deep=True)
    assert (found.faults, found.exit_code) == ((), 0)
    assert found.notes == (
        "plus1 (hidden_states.0, hidden_states.4): not finished, 1 of 3 shards are committed; "
        "nothing reads it yet",
    )
    assert document(found, None, None)["extend_commands"] == commands(cache)
    assert len(commands(cache)) == 1
    assert "hidden_states.0" not in dspark.open_cache(cache)[0]


def test_a_repair_of_the_first_files_leaves_the_added_ones(cache: Path, plus: CachePaths) -> None:
    cut(CachePaths(cache, 3).shard(2))
    before = {n: d for n, d in digests(cache).items() if "plus1" in n}
    assert repair_cache(dspark.verify_cache(cache)) == Repair((2,), (), ())
    assert before.items() <= digests(cache).items()
    manifest = read_manifest(cache)
    assert (manifest.complete, manifest.extensions[0].complete) == (False, True)
    (command,) = commands(cache)
    assert command.startswith("dspark capture --shards 3 ")


def test_committed_shards_of_an_unfinished_extension_are_checked(
    cache: Path, plus: CachePaths
) -> None:
    manifest = read_manifest(cache)
    unfinished = replace(manifest.extensions[0], complete=False)
    write_manifest(cache, manifest.with_extension(1, unfinished))
    plus.index(0).unlink()
    assert dspark.verify_cache(cache, deep=True).exit_code == 0
    cut(plus.shard(1))
    assert dspark.verify_cache(cache).exit_code == 1


@pytest.mark.parametrize("folder", ["shards", "index"])
def test_an_added_file_that_cannot_be_read_may_be_sound(cache: Path, folder: str) -> None:
    (path,) = (cache / folder).glob("shard-00001-*.plus1.*")
    name = str(path.relative_to(cache))
    before = digests(cache)
    with no_rights(path):
        found = dspark.verify_cache(cache, deep=True)
        assert (found.faults, found.exit_code) == ((), 2)
        (unreadable,) = found.unreadable
        assert (unreadable.file, unreadable.shard, unreadable.part) == (name, 1, 1)
        assert next_steps(found).startswith("what cannot be read may be sound")
        with pytest.raises(InputError, match="cannot be read .*nothing was taken out"):
            repair_cache(found)
        with pytest.raises(UnreadableError, match="so it may be sound; make it readable"):
            list(map(dspark.open_cache(cache).__getitem__, read_manifest(cache).rows_of(1)))
    assert digests(cache) == before
    assert dspark.verify_cache(cache, deep=True).exit_code == 0


def test_what_reads_as_sound_again_is_left_alone(cache: Path, plus: CachePaths) -> None:
    part = read_manifest(cache).parts[1]
    layout = ShardLayout(part.fields, part.rows_per_shard)
    for shard in (0, 1):
        (entry, *_) = [r for r in read_index(plus, part, shard)[0].to_pylist() if r["length"]]
        at, _ = layout.row_extents(part.fields[1], entry["row"], entry["length"])[0]
        xor_byte(plus.shard(shard), at, 1)
    before = digests(cache)
    found = dspark.verify_cache(cache, deep=True)
    xor_byte(plus.shard(1), at, 1)
    taken, sound = (str(plus.shard(shard).relative_to(cache)) for shard in (0, 1))
    assert repair_cache(found) == Repair(files=(taken,), sound=(sound,))
    gone = {taken, str(plus.index(0).relative_to(cache))}
    assert before.keys() - digests(cache).keys() == gone


def test_a_foreign_manifest_is_one_fault(cache: Path, tmp_path: Path) -> None:
    other = write_cache(tmp_path / "other", layers=(1,), position_rows=3)
    before = digests(cache)
    manifest_path(cache).write_bytes(manifest_path(other).read_bytes())
    found = dspark.verify_cache(cache)
    (fault,) = found.faults
    assert fault.file == "manifest.json"
    assert repair_cache(found) == Repair(files=("manifest.json",))
    assert before.keys() - digests(cache).keys() == {"manifest.json"}
