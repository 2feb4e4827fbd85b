"""A cache to which fields were added: read from several files as if from one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flipped_bytes import xor_byte
from safetensors import safe_open
from synthetic_cache import add_extension, write_cache

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest, write_manifest
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import open_cache, require_fields
from dspark.train_from_cache.stream import BatchStream


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", layers=(2,), position_rows=3)


def needs(root: Path, layers: Sequence[int], arch: str, *more: str) -> str:
    """The command that a draft is refused with that reads these layers."""
    names = ["input_ids", *(f"hidden_states.{k}" for k in layers), *more]
    with pytest.raises(IncompatibleCacheError, match="which this cache does not hold") as refused:
        require_fields(open_cache(root), names, arch)
    return str(refused.value).rpartition(": ")[2]


def test_the_command_that_adds_what_is_missing(cache: Path) -> None:
    extend = "dspark capture --extend"
    assert needs(cache, [0, 1, 2, 3, 4], "dspark") == f"{extend} --drafts dspark --out {cache}"
    assert needs(cache, [1, 2, 3], "mine") == f"{extend} --layers 1,3 --out {cache}"
    assert needs(cache, [-1, 1], "dspark") == f"{extend} --layers=-1,1 --out {cache}"
    assert needs(cache, [2], "msd", "logits") == f"{extend} --logits full --out {cache}"
    spaced = cache.rename(cache.parent / "a cache")
    assert needs(spaced, [1], "dspark") == f"{extend} --drafts dspark --out '{spaced}'"


def test_rows_are_read_from_all_files(cache: Path) -> None:
    before = [open_cache(cache)[i] for i in range(40)]
    one, two = add_extension(cache, layers=(0, 4)), add_extension(cache, logits="topk:3", seed=2)
    with open_cache(cache, check_digests=True) as opened:
        assert len(opened.manifest.all_fields) == len(opened.manifest.fields) + 5
        for sample in (0, 13, 14, 39):
            row = opened[sample]
            assert before[sample].items() and all(
                torch.equal(row[k], v) for k, v in before[sample].items()
            )
            shard, place = divmod(sample, 14)
            for paths, name in ((one, "hidden_states.4"), (two, "logits_topk.values")):
                with safe_open(paths.shard(shard), "pt") as file:
                    stored = file.get_tensor(name)[place]
                assert torch.equal(row[name], stored[: len(row[name])])
        fields = [opened.field("hidden_states.4"), opened.field("input_ids")]
        with BatchStream(opened, fields, [[0, 13, 14]], batch_size=3, trim=True) as stream:
            (batch,) = stream
            assert sorted(batch["sample"].tolist()) == [0, 13, 14]
            for i, sample in enumerate(batch["sample"].tolist()):
                expected = opened[sample]["hidden_states.4"]
                assert torch.equal(batch["hidden_states.4"][i, : len(expected)], expected)


def test_only_the_files_of_what_is_read_are_opened(cache: Path) -> None:
    add_extension(cache, layers=(0,))
    opened = open_cache(cache)
    out = torch.empty(32, 16)

    def files() -> set[str]:
        links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return {p.name for fd in links if (p := fd.resolve()).suffix == ".safetensors"}

    before = files()
    opened.read_row(0, opened.field("hidden_states.0"), out)
    assert files() - before == {"shard-00000-of-00003.plus1.safetensors"}
    opened.close()
    assert files() == before


def test_an_unfinished_extension_is_not_read(cache: Path) -> None:
    paths = add_extension(cache, layers=(0,))
    manifest = read_manifest(cache)
    unfinished = replace(manifest.extensions[0], complete=False)
    write_manifest(cache, manifest.with_extension(1, unfinished))
    for shard in range(3):
        paths.index(shard).unlink()
    opened = open_cache(cache)
    assert "hidden_states.0" not in opened[0]
    assert needs(cache, [0, 2], "dspark").endswith(f"--extend --drafts dspark --out {cache}")


def test_damage_in_an_added_file_is_named_with_its_own_way_out(cache: Path) -> None:
    paths = add_extension(cache, layers=(0, 1))
    part = read_manifest(cache).parts[1]
    layout = ShardLayout(part.fields, part.rows_per_shard)
    xor_byte(paths.shard(1), layout.row_extents(part.fields[1], 2, 1)[0][0], 1)
    opened = open_cache(cache, check_digests=True)
    with pytest.raises(IncompatibleCacheError, match="hidden_states.1 of dataset row 16 is") as no:
        opened[16]
    assert str(no.value).startswith(str(paths.shard(1)))
    assert str(no.value).endswith(
        f": dspark capture --extend --layers 0,1 --out {cache} --device cpu"
    )
    paths.index(1).unlink()
    for check_digests in (False, True):
        opened = open_cache(cache, check_digests=check_digests)
        assert "hidden_states.1" in opened[2]
        with pytest.raises(IncompatibleCacheError, match="plus1.parquet: .* missing.* --extend"):
            opened[16]


def test_an_index_of_other_rows_is_refused(cache: Path) -> None:
    paths, part = add_extension(cache, layers=(0,)), read_manifest(cache).parts[1]
    table, facts = read_index(paths, part, 0)
    rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist()]
    rows[0] = replace(rows[0], length=rows[0].length - 1, loss_tokens=0, image_tokens=0)
    write_index(paths.index(0), rows, facts)
    with pytest.raises(IncompatibleCacheError, match="plus1.parquet: it lists other rows than"):
        open_cache(cache, check_digests=True)[1]
