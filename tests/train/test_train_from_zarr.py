"""Training, evaluation and ``inspect`` on the zarr form: the same as on safetensors."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import into_folder
from flipped_bytes import xor_byte
from runs import OPTIONS, assert_same_weights, config_of, records
from synthetic_cache import write_cache

import dspark
from dspark.convert.run import convert
from dspark.reports.inspection import inspection
from dspark.reports.verification import next_steps, verification
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.inspection import inspect_cache, inspect_sample

STEPS = {**OPTIONS, "steps": 5}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cache in both forms."""
    folder = tmp_path_factory.mktemp("zarr")
    cache = write_cache(folder / "safetensors", dtype="bf16", position_rows=3, samples=60)
    convert(str(cache), str(folder / "zarr"), format="zarr", num_workers=1)
    return cache, folder / "zarr"


def test_weights_and_measurements_are_the_same(caches: tuple[Path, Path], tmp_path: Path) -> None:
    for arch in ("eagle3", "msd"):
        given = {**STEPS, "draft_config": config_of(arch)}
        for root in caches:
            dspark.train_draft(root, arch, tmp_path / f"{arch}-{root.name}", **given)
        assert_same_weights(tmp_path / f"{arch}-safetensors", tmp_path / f"{arch}-zarr")
        assert records(tmp_path / f"{arch}-safetensors") == records(tmp_path / f"{arch}-zarr")
    found = [dspark.evaluate_drafts(root, [str(tmp_path / "msd-zarr")]) for root in caches]
    one, other = (json.dumps(f).replace(str(r), "") for f, r in zip(found, caches, strict=True))
    assert one == other


def test_inspection(caches: tuple[Path, Path]) -> None:
    cache, other = map(inspect_cache, map(str, caches))
    assert cache["shard_format"] == {"name": "safetensors"}
    assert other["shard_format"] == {"name": "zarr", "codec": "zstd", "level": 1}
    for key in ("counts", "num_samples", "layers", "real_bytes", "committed_shards"):
        assert cache[key] == other[key]
    assert 0 < other["physical_bytes"] < 5 * other["real_bytes"]
    assert "shards as zarr (zstd 1): " in inspection(other)
    assert "shards: " in inspection(cache)
    assert inspect_sample(str(caches[1]), 6)["status"] == "skipped"


def test_a_draft_from_a_cache_with_its_fields_alone(
    caches: tuple[Path, Path], tmp_path: Path
) -> None:
    to = tmp_path / "small"
    fields = "inputs_embeds,last_hidden_state"
    convert(str(caches[0]), str(to), format="zarr", fields=fields, num_workers=1)
    for root in (caches[0], to):
        dspark.train_draft(root, "msd", tmp_path / f"msd-{root.name}", **STEPS)
    assert_same_weights(tmp_path / "msd-safetensors", tmp_path / "msd-small")
    with pytest.raises(
        IncompatibleCacheError,
        match=r"which this cache does not hold; this makes another with them: "
        r"dspark convert --cache ORIGINAL --to NEW --format zarr .*hidden_states.0",
    ):
        dspark.train_draft(to, "eagle3", tmp_path / "e", **STEPS, draft_config=config_of("eagle3"))


@pytest.mark.parametrize("logits", ["full", "topk:4"])
def test_stored_logits_stay_with_some_fields(tmp_path: Path, logits: str) -> None:
    cache = write_cache(tmp_path / "cache", logits=logits)
    to = tmp_path / "small"
    convert(
        str(cache), str(to), format="zarr", fields="inputs_embeds,last_hidden_state", num_workers=1
    )
    dspark.train_draft(to, "msd", tmp_path / "msd", **STEPS)


def test_what_finishes_a_conversion_of_some_fields_is_a_conversion(tmp_path: Path) -> None:
    cache, to = write_cache(tmp_path / "cache"), tmp_path / "small"
    given = {"format": "zarr", "fields": "inputs_embeds,last_hidden_state", "num_workers": 1}
    convert(str(cache), str(to), only="0", **given)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleCacheError) as told:
        dspark.open_cache(to)
    found = dspark.verify_cache(to)
    for said in (str(told.value), f"{verification(found)}\n{next_steps(found)}"):
        assert "the conversion is not finished" in said
        assert f"dspark convert --cache ORIGINAL --to {to} " in said
        assert "--chat-template" not in said


@pytest.mark.parametrize(
    "damage, match",
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: os.truncate(path, path.stat().st_size - 3), "its index does not have"),
        (lambda path: xor_byte(path, 99, 4), "inputs_embeds of dataset row 21 is damaged: a chunk"),
        (into_folder, "not a file|Is a directory"),
    ],
    ids=["missing", "cut", "flipped", "folder"],
)
def test_damage_stops_a_training_without_check_digests(
    tmp_path: Path, damage: Callable[[Path], None], match: str
) -> None:
    cache = write_cache(tmp_path / "cache", samples=60)
    convert(str(cache), str(tmp_path / "z"), format="zarr", num_workers=1)
    path = CachePaths(tmp_path / "z", 3).group(1) / "inputs_embeds" / "c.0.0.0"
    damage(path)
    with pytest.raises(IncompatibleCacheError, match=match) as told:
        dspark.train_draft(tmp_path / "z", "msd", tmp_path / "d", **OPTIONS)
    assert str(path) in str(told.value)
    assert "--deep --repair" in str(told.value)
