"""The manifest says all, survives a round trip, and is refused when damaged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.fields import build_fields
from dspark.schemas.manifest import (
    Counts,
    Manifest,
    TargetFacts,
    identity_differences,
    read_manifest,
    write_manifest,
)
from dspark.schemas.shard_layout import ShardLayout


def make_manifest() -> Manifest:
    fields = build_fields(
        max_length=8,
        hidden_size=4,
        vocab_size=6,
        layers=[-1, 1],
        dtype="bf16",
        logits="full",
        position_rows=3,
    )
    target = TargetFacts(
        "t", "", "A", "m", "q", 4, 4, 6, 6, 5, None, [2], 0, {"hidden_size": 4, "rope": None}
    )
    return Manifest(
        identity={"dtype": "bf16", "layers": [-1, 1]},
        target=target,
        data="d.parquet",
        num_samples=10,
        rows_per_shard=3,
        num_shards=4,
        max_length=8,
        dtype="bf16",
        fields=tuple(fields),
        layers=(-1, 1),
        logits="full",
        versions={"torch": "2"},
        shard_bytes=ShardLayout(fields, 3).file_size,
    )


def test_round_trip(tmp_path: Path) -> None:
    manifest = make_manifest().finished(Counts(9, {"too long": 1}, 70, 8, 20), 0.25)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_both_layer_conventions_are_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, make_manifest())
    document = json.loads((tmp_path / "manifest.json").read_text())
    assert document["layers"] == {"output_of_layer": [-1, 1], "huggingface_index": [0, 2]}
    assert document["conventions"]["loss_mask"] == "unshifted"
    assert document["conventions"]["last_hidden_state"] == "post_norm"


def test_rows_map_to_shards_by_arithmetic() -> None:
    manifest = make_manifest()
    assert [list(manifest.rows_of(i)) for i in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    tail = replace(manifest, num_samples=5, rows_per_shard=2)
    assert [list(tail.rows_of(i)) for i in range(4)] == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="zip"), "not a cache manifest"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.pop("fields"), "damaged"),
        (lambda d: d.update(num_samples="many"), "damaged"),
        (lambda d: d["target"].update(surprise=1), "damaged"),
        (lambda d: d.update(num_samples=-3), "num_samples is -3"),
        (lambda d: d.update(num_samples=10**15), "num_samples is"),
        (lambda d: d.update(num_samples=999), "rows_per_shard is 3"),
        (lambda d: d.update(num_shards=0), "num_shards is 0"),
        (lambda d: d.update(dtype="int4"), "dtype is 'int4'"),
        (lambda d: d["logits"].update(mode="some"), "logits.mode is 'some'"),
        (lambda d: d.update(fields=[]), "fields"),
        (lambda d: d["fields"][0].update(dtype="F8"), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[3]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[3, 8, 0]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(token_axis=9), "field 'inputs_embeds'"),
        (lambda d: d["counts"].update(tokens="x"), "counts"),
        (lambda d: d["target"].update(vocab_size="x"), "vocab_size is 'x'"),
        (lambda d: d["target"].update(eos_token_ids=None), "eos_token_ids"),
        (lambda d: d.update(shard_bytes=1), "shard_bytes is 1"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    write_manifest(tmp_path, make_manifest())
    path = tmp_path / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(IncompatibleCacheError, match=words):
        read_manifest(tmp_path)
    path.write_text("{")
    with pytest.raises(IncompatibleCacheError, match="JSON"):
        read_manifest(tmp_path)


def test_differences_name_the_field_and_both_values() -> None:
    old = {"dtype": "bf16", "same": 1}
    assert identity_differences(old, {"dtype": "fp32", "same": 1}) == [
        "dtype: 'bf16' there, 'fp32' now"
    ]
