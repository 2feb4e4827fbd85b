"""``dspark convert``: there and back to the same bytes, and smaller caches."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zarr
from damage import into_folder
from flipped_bytes import xor_byte
from safetensors import safe_open
from synthetic_cache import add_extension, with_columns, write_cache

import dspark
from dspark.convert.run import convert
from dspark.reports.conversion import conversion
from dspark.schemas.digest import json_digest
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.fields import is_scale
from dspark.schemas.index import read_index
from dspark.schemas.manifest import Manifest, read_manifest, write_manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths, columns_path, head_path, manifest_path
from dspark.schemas.shard_format import ShardFormat
from dspark.train_from_cache.decode import decode
from dspark.train_from_cache.target_head import TargetHead
from dspark.verify.repair import repair_cache

KINDS = {
    "fp32, full logits": {"logits": "full"},
    "bf16, top logits, mRoPE": {"dtype": "bf16", "logits": "topk:5", "position_rows": 3},
    "fp16, a shard without samples": {"dtype": "fp16", "samples": 9, "shards": 4},
    "8 bits": {"dtype": "fp8"},
    # Rows of several blocks of the disk, of which pictures fill a part of the first.
    "pictures alone": {"dtype": "bf16", "embeds": "pictures", "max_length": 900, "samples": 9},
    "8 bits of pictures alone": {"dtype": "fp8", "embeds": "pictures", "max_length": 900},
}


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def data_ranges(path: Path) -> list[tuple[int, int]]:
    """Where a file is no hole, by offset."""
    found, end = [], 0
    with open(path, "rb") as file:
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing more
                return found
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, end))


def on_disk(root: Path) -> int:
    return sum(p.stat().st_blocks for p in (root / "shards").rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_cache(
        tmp_path_factory.mktemp("convert") / "cache", layers=(0, 1, 2), dtype="bf16", samples=60
    )
    add_extension(root, layers=(3, 4))
    add_extension(root, logits="topk:4")
    return root


@pytest.mark.parametrize("kind, codec", zip(KINDS, ["zstd", "lz4", "none"] * 2, strict=True))
def test_there_and_back(tmp_path: Path, kind: str, codec: str) -> None:
    cache = write_cache(tmp_path / "cache", layers=(0, 1), **KINDS[kind])  # type: ignore[arg-type]
    add_extension(cache, layers=(3,))
    there = convert(
        str(cache),
        str(tmp_path / "zarr"),
        format="zarr",
        codec=codec,
        num_workers=1,  # type: ignore
    )
    back = convert(
        str(tmp_path / "zarr"), str(tmp_path / "back"), format="safetensors", num_workers=1
    )
    assert files(tmp_path / "back") == files(cache)
    for path in (cache / "shards").iterdir():
        assert data_ranges(tmp_path / "back" / "shards" / path.name) == data_ranges(path)
    assert there.bytes_before == 512 * on_disk(cache)
    assert there.bytes_after == back.bytes_before == 512 * on_disk(tmp_path / "zarr")
    before, after = read_manifest(cache), read_manifest(tmp_path / "zarr")
    assert after.shard_format == ShardFormat.zarr(codec)
    assert after.identity_hash == before.identity_hash
    assert dspark.verify_cache(tmp_path / "zarr", deep=True).exit_code == 0
    assert not dspark.verify_cache(tmp_path / "zarr").notes


def test_plain_zarr_reads_what_safetensors_reads(cache: Path, tmp_path: Path) -> None:
    convert(str(cache), str(tmp_path / "z"), format="zarr", num_workers=1)
    manifest = read_manifest(cache)
    for paths, part in parts(cache, manifest):
        of_zarr = CachePaths(tmp_path / "z", manifest.num_shards, paths.part)
        for shard in range(manifest.num_shards):
            group = zarr.open_group(of_zarr.group(shard), mode="r")
            with safe_open(paths.shard(shard), "pt") as file:
                for field in part.fields:
                    array = group[field.name]
                    assert isinstance(array, zarr.Array)
                    tensor = torch.from_numpy(array[...])
                    if field.dtype == "BF16":
                        tensor = tensor.view(torch.bfloat16)
                    assert torch.equal(tensor, file.get_tensor(field.name))


def test_several_processes_other_codecs_and_shard_by_shard(cache: Path, tmp_path: Path) -> None:
    """All ways to a form end in the same bytes."""
    one = convert(str(cache), str(tmp_path / "one"), format="zarr", codec="lz4", num_workers=1)
    assert one.missing == () and one.converted == 3
    convert(str(cache), str(tmp_path / "zstd"), format="zarr", codec="zstd", level=7, num_workers=1)
    two = convert(
        str(tmp_path / "zstd"), str(tmp_path / "two"), format="zarr", codec="lz4", num_workers=2
    )
    assert two.converted == 3
    assert files(tmp_path / "two") == files(tmp_path / "one")
    to = str(tmp_path / "some")
    some = convert(str(cache), to, format="zarr", codec="lz4", only="1-2", num_workers=1)
    assert (some.converted, some.missing) == (2, (0,))
    assert "not complete: shard 0 of 3 is left to other jobs" in conversion(some)
    with pytest.raises(IncompatibleCacheError, match="not finished"):
        dspark.open_cache(to)
    rest = convert(str(cache), to, format="zarr", codec="lz4", num_workers=1)
    assert (rest.converted, rest.missing) == (1, ())
    assert files(Path(to)) == files(tmp_path / "one")
    assert "as zarr (lz4 5) with 15 fields" in conversion(rest)
    again = convert(str(cache), to, format="zarr", codec="lz4", num_workers=1)
    assert again.converted == 0
    assert "complete already" in conversion(again)


def test_what_is_damaged_in_the_new_cache_is_made_again(cache: Path, tmp_path: Path) -> None:
    to = tmp_path / "z"
    convert(str(cache), str(to), format="zarr", num_workers=1)
    whole = files(to)
    group = CachePaths(to, 3).group(1)
    (group / "hidden_states.1" / "c.0.0.0").unlink()
    os.truncate(CachePaths(to, 3, 2).group(2) / "logits_topk.values" / "c.0.0.0", 50)
    head_path(to).unlink()
    xor_byte(columns_path(to), 4100, 1)
    CachePaths(to, 3).index(0).write_bytes(b"")
    assert convert(str(cache), str(to), format="zarr", num_workers=1).converted == 3
    assert files(to) == whole
    columns_path(to).unlink()
    (fault,) = dspark.verify_cache(to).faults
    assert fault.file == "index/columns.safetensors"
    repair_cache(dspark.verify_cache(to))
    assert convert(str(cache), str(to), format="zarr", num_workers=1).converted == 0
    assert files(to) == whole


def test_damaged_columns_of_the_source_are_told_before_anything_is_written(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache")
    xor_byte(columns_path(cache), 4100, 1)
    with pytest.raises(
        IncompatibleCacheError, match="columns.safetensors: damaged.*dspark capture"
    ):
        convert(str(cache), str(tmp_path / "to"), format="zarr", num_workers=1)
    assert not (tmp_path / "to").exists()
    with_columns(cache)
    assert convert(str(cache), str(tmp_path / "to"), format="zarr", num_workers=1).missing == ()
    assert dspark.verify_cache(tmp_path / "to", deep=True).exit_code == 0


def test_rows_are_the_same(cache: Path, tmp_path: Path) -> None:
    convert(str(cache), str(tmp_path / "z"), format="zarr", num_workers=1)
    stored = dspark.open_cache(cache)
    converted = dspark.open_cache(tmp_path / "z", check_digests=True)
    for sample in range(len(stored)):
        one, other = stored[sample], converted[sample]
        assert [*one] == [*other]
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_fewer_fields(cache: Path, tmp_path: Path) -> None:
    to = tmp_path / "small"
    given = "hidden_states.1, hidden_states.4,last_hidden_state,inputs_embeds"
    report = convert(str(cache), str(to), format="zarr", fields=given, num_workers=1)
    assert "with 12 fields, the stored logits among them" in conversion(report)
    manifest = read_manifest(to)
    assert manifest.all_layers == (1, 4)
    assert [len(part.fields) for part in manifest.parts] == [8, 1, 3]  # logits stay
    assert manifest.best_logits == "topk:4"
    assert dspark.verify_cache(to, deep=True).exit_code == 0
    stored, small = dspark.open_cache(cache), dspark.open_cache(to, check_digests=True)
    names = [*given.replace(" ", "").split(","), "input_ids", "position_ids", "image_mask"]
    for sample in range(len(stored)):
        one, other = stored[sample], small[sample]
        assert {*names} < {*other}
        assert all(torch.equal(one[name], other[name]) for name in other)
    table, _ = read_index(CachePaths(to, 3), manifest.parts[0], 0)
    whole, _ = read_index(CachePaths(cache, 3), read_manifest(cache).parts[0], 0)
    places = [[f.name for f in read_manifest(cache).fields].index(f.name) for f in manifest.fields]
    for one, other in zip(whole["digests"].to_pylist(), table["digests"].to_pylist(), strict=True):
        assert other == ([one[place] for place in places] if one else [])
    convert(str(to), str(tmp_path / "back"), format="safetensors", num_workers=1)
    assert dspark.verify_cache(tmp_path / "back", deep=True).exit_code == 0


def test_fields_without_first_wide_ones(cache: Path, tmp_path: Path) -> None:
    """An extension of which nothing is kept goes, and the top logits stay together."""
    convert(
        str(cache), str(tmp_path / "t"), format="safetensors", fields="logits_topk.indices",
        num_workers=1,
    )  # fmt: skip
    manifest = read_manifest(tmp_path / "t")
    names = [field.name for field in manifest.all_fields]
    assert names[:2] == ["input_ids", "position_ids"]
    assert names[-3:] == ["logits_topk.values", "logits_topk.indices", "logits_topk.logsumexp"]
    assert len(manifest.extensions) == 1
    assert dspark.verify_cache(tmp_path / "t", deep=True).exit_code == 0


def test_an_unfinished_extension_is_left_out(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache", layers=(0,))
    whole = files(cache)
    add_extension(cache, layers=(1,))
    manifest = read_manifest(cache)
    document = json.loads(manifest_path(cache).read_bytes())
    assert document["extensions"][0]["complete"]
    unfinished = replace(manifest.extensions[0], complete=False)
    write_manifest(cache, manifest.with_extension(1, unfinished))
    report = convert(str(cache), str(tmp_path / "to"), format="safetensors", num_workers=1)
    assert report.left_out == 1
    assert "left out: 1 extension" in conversion(report)
    assert files(tmp_path / "to") == whole


def test_what_is_refused(cache: Path, tmp_path: Path) -> None:
    def refused(match: str, **given: object) -> None:
        options = {"cache": str(cache), "to": str(tmp_path / "to"), "format": "zarr", **given}
        with pytest.raises(InputError, match=match):
            convert(**options)  # type: ignore[arg-type]
        assert not (tmp_path / "to").exists()

    refused("--format tar: choose safetensors or zarr", format="tar")
    refused("--codec zstd: only --format zarr has it", format="safetensors", codec="zstd")
    refused("--level 23: no level of --codec zstd; it has 1 to 22", level=23)
    refused("--level 1: no level of --codec none; it has none", codec="none", level=1)
    refused("--num-workers 0: must be at least 1", num_workers=0)
    refused("--only 3: a cache of 3 has shards 0 to 2", only="3")
    refused("--fields pixels: the cache has no such field; it has inputs_embeds", fields="pixels")
    refused("--fields is empty", fields="")
    refused("must lie apart", to=str(cache))
    refused("must lie apart", to=str(cache / "below"))
    other = write_cache(tmp_path / "other", samples=4, shards=1, layers=())
    refused("it lies inside the cache .*/other; choose", to=str(other / "below"))
    assert not (other / "below").exists()
    refused("is not a cache", cache=str(tmp_path / "none"))
    refused("--cache s3://b/c: must be a path; copy", cache="s3://b/c")
    refused("--to s3://b/c: must be a path; give a folder", to="s3://b/c")
    (tmp_path / "file").write_text("x")
    refused("a file of that name exists", to=str(tmp_path / "file"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    refused("holds something else .notes.txt.", to=str(tmp_path / "full"))


def test_another_conversion_is_not_continued(cache: Path, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    convert(str(cache), to, format="zarr", only="0", num_workers=1)
    before = files(tmp_path / "to")
    for given, match in (
        ({"format": "safetensors"}, "its shards are zarr .zstd 1. there, safetensors now"),
        ({"format": "zarr", "level": 3}, "zarr .zstd 1. there, zarr .zstd 3. now"),
        ({"format": "zarr", "fields": "inputs_embeds"}, "fields: not given there"),
    ):
        with pytest.raises(IncompatibleCacheError, match=match):
            convert(str(cache), to, num_workers=1, **given)  # type: ignore[arg-type]
    other = write_cache(tmp_path / "other", seed=5)
    with pytest.raises(IncompatibleCacheError, match="holds another cache"):
        convert(str(other), to, format="zarr", num_workers=1)
    assert files(tmp_path / "to") == before


Damage = Callable[[Path], None]


def test_8_bits_keep_their_scales_and_pictures_their_mask(tmp_path: Path) -> None:
    """Whichever of the two is asked for; drafts read the same from the smaller cache."""
    source = write_cache(
        tmp_path / "cache", layers=(0, 1), dtype="fp8", embeds="pictures", max_length=600, samples=9
    )
    add_extension(source, layers=(3, 4))
    whole = dspark.open_cache(source)
    embeddings = TargetHead.load(source).embeddings
    for form, asked in (
        ("zarr", "inputs_embeds.scale,hidden_states.1,hidden_states.3.scale"),
        ("safetensors", "inputs_embeds,hidden_states.1.scale,hidden_states.3"),
    ):
        to = tmp_path / form
        convert(str(source), str(to), format=form, fields=asked, num_workers=1)  # type: ignore[arg-type]
        manifest = read_manifest(to)
        assert [
            f.name for f in manifest.all_fields if f.dtype == "F8_E4M3" or is_scale(f.name)
        ] == [
            *("inputs_embeds", "hidden_states.1", "inputs_embeds.scale", "hidden_states.1.scale"),
            *("hidden_states.3", "hidden_states.3.scale"),
        ]
        embeds = manifest.field("inputs_embeds")
        assert embeds is not None and embeds.where == "image_mask"
        assert dspark.verify_cache(to, deep=True).exit_code == 0
        small = dspark.open_cache(to, check_digests=True)
        for sample in range(len(whole)):
            one = decode(whole[sample], whole.manifest.all_fields, embeddings)
            other = decode(small[sample], manifest.all_fields, embeddings)
            assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    "damage, match, workers",
    [
        (lambda p: p.unlink(), "No such file or directory", 1),
        (lambda p: os.truncate(p, p.stat().st_size // 2), "damaged: ends before byte", 1),
        (lambda p: xor_byte(p, 6200, 1), "inputs_embeds of dataset row 21 is damaged", 1),
        (lambda p: xor_byte(p, 6200, 1), "inputs_embeds of dataset row 21 is damaged", 2),
        (into_folder, "Is a directory|not a file|damaged", 1),
    ],
    ids=["missing", "cut", "flipped", "flipped, two processes", "folder"],
)
def test_damage_of_the_source_is_named_and_not_converted(
    tmp_path: Path, damage: Damage, match: str, workers: int
) -> None:
    cache = write_cache(tmp_path / "cache", samples=60, layers=(0,))
    shard = CachePaths(cache, 3).shard(1)
    damage(shard)
    with pytest.raises(IncompatibleCacheError if workers == 1 else InputError, match=match) as told:
        convert(str(cache), str(tmp_path / "to"), format="zarr", num_workers=workers)
    assert str(shard) in str(told.value)
    assert "--deep --repair" in str(told.value)
    assert not CachePaths(tmp_path / "to", 3).index(1).exists()
    assert not (CachePaths(tmp_path / "to", 3).group(1) / "zarr.json").exists()


def test_a_manifest_with_an_impossible_form_is_refused(cache: Path, tmp_path: Path) -> None:
    convert(str(cache), str(tmp_path / "z"), format="zarr", num_workers=1)
    path = manifest_path(tmp_path / "z")
    for form in (
        *({}, None, "zarr", [], {"name": "zarr"}, {"name": "tar"}, {"name": "safetensors", "x": 1}),
        {"name": "zarr", "codec": "zstd", "level": 0},
        {"name": "zarr", "codec": "zstd", "level": True},
        {"name": "zarr", "codec": "none", "level": 1},
        {"name": "zarr", "codec": ["zstd"], "level": 1},
        {"name": "safetensors", "codec": "zstd", "level": 1},
    ):
        document = json.loads(path.read_bytes())
        del document["digest"]
        document["shard_format"] = form
        document["digest"] = json_digest(document)
        path.write_text(json.dumps(document))
        with pytest.raises(IncompatibleCacheError, match="damaged"):
            dspark.open_cache(tmp_path / "z")
    assert isinstance(read_manifest(cache), Manifest)
