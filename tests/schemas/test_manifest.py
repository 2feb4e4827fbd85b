"""The manifest says all, survives a round trip, and is refused when damaged."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dspark.schemas.columns import columns_layout
from dspark.schemas.digest import FileDigest, json_digest
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

COLUMNS = FileDigest(columns_layout(10).file_size, "0123456789abcdef")
COUNTS = Counts(9, {"too long": 1}, 70, 8, 20)
FINISHED = {"complete": True, "counts": asdict(COUNTS)}


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
        target_files={"head.safetensors": FileDigest(7, "0123456789abcdef")},
    )


def test_round_trip(tmp_path: Path) -> None:
    manifest = make_manifest().finished(COUNTS, 0.25, COLUMNS)
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


def forge(root: Path, document: dict[str, Any]) -> None:
    """Write a manifest whose digest is right, whatever else it says."""
    document = {k: v for k, v in document.items() if k != "digest"}
    text = json.dumps({**document, "digest": json_digest(document)})
    (root / "manifest.json").write_text(text)


def files(*names: str) -> dict[str, Any]:
    entry = {"bytes": 7, "digest": "0123456789abcdef"}
    return {"head.safetensors": entry, **{name: entry for name in names}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="zip"), "not a cache manifest"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.update(version=True), "version True"),
        (lambda d: d.update(version="1"), "version '1'"),
        (lambda d: d.update(version=10**400), "version 1000"),
        (lambda d: d.pop("fields"), "damaged"),
        (lambda d: d.update(num_samples="many"), "'many' is no int"),
        (lambda d: d.update(num_samples=10.0), "10.0 is no int"),
        (lambda d: d.update(complete=0), "0 is no bool"),
        (lambda d: d["target"].update(surprise=1), "damaged"),
        (lambda d: d["target"].update(id=None), "None is no str"),
        (lambda d: d.update(surprise=1), "'surprise' is not as version 1 has it"),
        (lambda d: d["layers"].update(huggingface_index=[1, 3]), "'layers' is not as"),
        (lambda d: d["layers"].update(output_of_layer=[1, -1]), r"layers are \[1, -1\]"),
        (lambda d: d["layers"].update(output_of_layer=[-1, 3]), r"layers are \[-1, 3\]"),
        (lambda d: d["conventions"].update(loss_mask="shifted"), "'conventions' is not as"),
        (lambda d: d["conventions"].update(last_hidden_state="pre_norm"), "'conventions' is not"),
        (lambda d: d.update(num_samples=-3), "num_samples is -3"),
        (lambda d: d.update(num_samples=10**15), "num_samples is"),
        (lambda d: d.update(num_samples=10**400), "num_samples is"),
        (lambda d: d.update(num_samples=999), "rows_per_shard is 3"),
        (lambda d: d.update(num_shards=0), "num_shards is 0"),
        (lambda d: d.update(num_shards=2**30, num_samples=2**31), "num_shards is"),
        (lambda d: d.update(max_length=2**31), "max_length is"),
        (lambda d: d.update(dtype="int4"), "dtype is 'int4'"),
        (lambda d: d["logits"].update(mode="some"), "logits.mode is 'some'"),
        (lambda d: d["logits"].update(mode="topk:7"), "logits.mode is 'topk:7'"),
        (lambda d: d["logits"].update(mode="head"), "fields"),
        (lambda d: d["logits"].update(head_error=-1.0), "head_error is -1"),
        (lambda d: d.update(fields=[]), "fields: 0 of them"),
        (lambda d: d["fields"].append(d["fields"][0]), "fields: 11"),
        (lambda d: d["fields"].__setitem__(1, d["fields"][0]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(name="__metadata__"), "field '__metadata__'"),
        (lambda d: d["fields"][0].update(dtype="F8"), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[3]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[3, 8, 0]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[3, 8, 2**62]), "field 'inputs_embeds'"),
        (lambda d: d["fields"][0].update(shape=[4, 8, 4]), "'fields' is not as"),
        (lambda d: d["fields"][0].update(token_axis=9), "field 'inputs_embeds'"),
        (lambda d: d["fields"][6].update(token_axis=1), "field 'position_ids'"),
        (lambda d: d["counts"].update(tokens="x"), "counts"),
        (lambda d: d["counts"].update(ok=1, tokens=9), "counts"),
        (lambda d: d["counts"].update(loss_tokens=1), "counts"),
        (lambda d: d.update(complete=True), "counts"),
        (lambda d: d.update(FINISHED, columns=None), "complete and lacks columns"),
        (lambda d: d.update(columns={"bytes": 4096, "digest": "0" * 16}), "columns cannot be so"),
        (lambda d: d.update(columns=asdict(COLUMNS) | {"digest": "x"}), "columns cannot be so"),
        (lambda d: d.update(columns=asdict(COLUMNS) | {"digest": 7}), "7 is no str"),
        (lambda d: d.update(columns=asdict(COLUMNS) | {"bytes": 4216.0}), "4216.0 is no int"),
        (lambda d: d.update(columns=asdict(COLUMNS) | {"surprise": 7}), "damaged"),
        (lambda d: d.update(columns=[1, 2]), "damaged"),
        (lambda d: d["target"].update(vocab_size="x"), "'x' is no int"),
        (lambda d: d["target"].update(eos_token_ids=None), "eos_token_ids"),
        (lambda d: d["target"].update(text=[]), "damaged"),
        (lambda d: d.update(shard_bytes=1), "shard_bytes is 1"),
        (lambda d: d.update(target_files=files("../../home/key")), "not inside target/"),
        (lambda d: d.update(target_files=files("/etc/passwd")), "not inside target/"),
        (lambda d: d.update(target_files=files("a/../../b")), "not inside target/"),
        (lambda d: d.update(target_files=files("a//b")), "not inside target/"),
        (lambda d: d.update(target_files=files("")), "not inside target/"),
        (lambda d: d.update(target_files=files(".")), "not inside target/"),
        (lambda d: d.update(target_files=files("a\0")), "not inside target/"),
        (lambda d: d.update(target_files={}), "lacks the head"),
        (lambda d: d["identity"].update(batch_tokens="x"), "identity: batch_tokens is 'x'"),
        (lambda d: d["identity"].update(batch_tokens=0), "identity: batch_tokens is 0"),
        (lambda d: d["identity"].update(tensor_parallel=[2]), r"identity: tensor_parallel is \[2"),
        (lambda d: d["identity"].update(fake_image=1), "identity: fake_image is 1"),
        (lambda d: d["identity"].update(data=None), "identity: data is None"),
        (lambda d: d["identity"].update(image_root=7), "identity: image_root is 7"),
        (lambda d: d.update(data="a\0b"), "is no name"),
        (lambda d: d["target"].update(id="a\ud800b"), "UnicodeEncodeError"),
        (lambda d: d["target_files"]["head.safetensors"].update(bytes=-1), "head.safetensors"),
        (lambda d: d["target_files"]["head.safetensors"].update(digest="x"), "head.safetensors"),
    ],
)
def test_damage_is_one_sentence_although_the_digest_is_right(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    write_manifest(tmp_path, make_manifest())
    document = json.loads((tmp_path / "manifest.json").read_text())
    change(document)
    forge(tmp_path, document)
    with pytest.raises(IncompatibleCacheError, match=words) as error:
        read_manifest(tmp_path)
    assert len(str(error.value)) < 1000


def test_numbers_whose_product_overflows_are_refused(tmp_path: Path) -> None:
    """Every size is allowed alone, and the whole fits its own layout."""
    t, h = 2**31 - 1, 2**31 - 1
    manifest = make_manifest()
    fields = build_fields(
        max_length=t,
        hidden_size=h,
        vocab_size=6,
        layers=[-1, 1],
        dtype="bf16",
        logits="full",
        position_rows=3,
    )
    write_manifest(
        tmp_path,
        replace(
            manifest,
            max_length=t,
            target=replace(manifest.target, hidden_size=h),
            fields=tuple(fields),
            shard_bytes=ShardLayout(fields, 3).file_size,
        ),
    )
    with pytest.raises(IncompatibleCacheError, match="shard_bytes is"):
        read_manifest(tmp_path)


def test_files_of_folders_inside_target_are_allowed(tmp_path: Path) -> None:
    names = files("a/b.jinja", "..x", "with space")
    manifest = replace(make_manifest(), target_files={n: FileDigest(**f) for n, f in names.items()})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"NaN", "NaN"),
        (b"-Infinity", "Infinity"),
        (b"1e999", "finite"),
        (b"1" * 5000, "digit"),
        (b"[" * 10**5, "nested"),
        (b"[" * 70 + b"]" * 70, "nested"),
        (b'{"a": 1, "a": 1}', "twice"),
        (b'"\xff"', "utf-8"),
        (b"", "JSON"),
        (b"01", "JSON"),
    ],
)
def test_odd_json_is_one_sentence(tmp_path: Path, value: bytes, words: str) -> None:
    write_manifest(tmp_path, make_manifest())
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"d.parquet"', value))
    with pytest.raises(IncompatibleCacheError, match=words) as error:
        read_manifest(tmp_path)
    assert str(error.value).startswith(f"{path}: not readable as JSON")
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("what", ["directory", "pipe", "huge", "list", "empty", "link to itself"])
def test_what_is_no_manifest_at_all(tmp_path: Path, what: str) -> None:
    path = tmp_path / "manifest.json"
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link to itself":
        path.symlink_to(path)
    else:
        path.write_bytes(b"[]" if what == "list" else b"")
        if what == "huge":
            os.truncate(path, 10**9)
    with pytest.raises(IncompatibleCacheError, match=str(path)) as error:
        read_manifest(tmp_path)
    assert what != "huge" or "1,000,000,000 bytes" in str(error.value)


def test_each_flipped_byte_is_found_or_means_nothing(tmp_path: Path) -> None:
    manifest = make_manifest()
    write_manifest(tmp_path, manifest)
    path = tmp_path / "manifest.json"
    data = path.read_bytes()
    kept = set()
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            got = read_manifest(tmp_path)
        except IncompatibleCacheError as error:
            assert "\n" not in str(error)
        else:
            assert got == manifest
            kept.add(data[at : at + 1])
    assert kept <= {b" ", b"\n"}


def test_a_changed_word_is_found_by_the_digest(tmp_path: Path) -> None:
    write_manifest(tmp_path, make_manifest())
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("d.parquet", "e.parquet"))
    with pytest.raises(IncompatibleCacheError, match="digest"):
        read_manifest(tmp_path)


def test_white_space_and_order_of_keys_mean_nothing(tmp_path: Path) -> None:
    write_manifest(tmp_path, make_manifest())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert read_manifest(tmp_path) == make_manifest()


def test_differences_name_the_field_and_both_values() -> None:
    old = {"dtype": "bf16", "same": 1, "image_root": None}
    assert identity_differences(old, {"dtype": "fp32", "same": 1, "image_root": "/x"}) == [
        "dtype: 'bf16' there, 'fp32' now",
        "image_root: not given there, '/x' now",
    ]
