"""What a manifest says of added fields is checked as strictly as all the rest."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_cache import add_extension, write_cache

from dspark.schemas.digest import json_digest
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.extension import layers_document
from dspark.schemas.manifest import manifest_path, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    root = write_cache(tmp_path / "cache", layers=(2,))
    add_extension(root, layers=(0, 1, 3))
    return root


def test_round_trip(cache: Path) -> None:
    before = manifest_path(cache).read_bytes()
    manifest = read_manifest(cache)
    write_manifest(cache, manifest)
    assert manifest_path(cache).read_bytes() == before
    (extension,) = json.loads(before)["extensions"]
    assert extension["layers"] == layers_document([0, 1, 3])
    assert [f["name"] for f in extension["fields"]] == [f"hidden_states.{k}" for k in (0, 1, 3)]
    assert extension["fields"][0] == {
        "name": "hidden_states.0",
        "dtype": "F32",
        "shape": [14, 32, 16],
        "token_axis": 1,
    }


def test_parts(cache: Path) -> None:
    manifest = read_manifest(cache)
    first, added = manifest.parts
    assert first.fields == manifest.fields
    assert first.identity_hash == manifest.identity_hash != added.identity_hash
    assert added.identity == {
        **manifest.identity,
        **{"layers": [0, 1, 3], "logits": "head"},
        **{"device": "cpu", "tensor_parallel": 1, "torch": "2", "transformers": "5"},
    }
    assert manifest.all_fields == (*first.fields, *added.fields)
    assert manifest.all_layers == (0, 1, 2, 3)
    assert manifest.field("hidden_states.3") == added.fields[2]
    names = [CachePaths(cache, 3, part).shard(1).name for part in (0, 1)]
    assert names == [f"shard-00001-of-00003{plus}.safetensors" for plus in ("", ".plus1")]


def test_a_cache_without_has_no_such_entry(tmp_path: Path) -> None:
    assert "extensions" not in json.loads(manifest_path(write_cache(tmp_path)).read_bytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e[0].update(complete=1), "complete is 1"),
        (lambda e: e[0].update(layers=layers_document([0, 1])), "3 of them, 2 expected"),
        (lambda e: e[0].update(layers=layers_document([0, 1, 5])), "layers are [0, 1, 5]"),
        (lambda e: e[0].update(layers=layers_document([1, 0, 3])), "layers are [1, 0, 3]"),
        (lambda e: e[0]["layers"]["huggingface_index"].pop(), "'extensions' is not as version"),
        (lambda e: e[0].update(logits="topk:0"), "logits is 'topk:0'"),
        (lambda e: e[0].update(logits="topk:99"), "logits.mode is 'topk:99'"),
        (lambda e: e[0].update(logits="head"), "logits is 'head'"),
        (lambda e: e[0].update(logits="full"), "3 of them, 4 expected"),
        (lambda e: e[0]["fields"][0].update(dtype="BF16"), "is not as the rest asks for"),
        (lambda e: e[0]["fields"][0].update(name="input_ids"), "is not as the rest asks for"),
        (lambda e: e[0]["fields"][0]["shape"].append(1), "is not as the rest asks for"),
        (lambda e: e[0]["fields"][0]["shape"].__setitem__(0, 1), "'extensions' is not as version"),
        (lambda e: e[0].update(shard_bytes=4096), "shard_bytes is 4096"),
        (lambda e: e[0].update(identity=[]), "identity is []"),
        (lambda e: e[0]["identity"].pop("torch"), "identity is"),
        (lambda e: e[0]["identity"].update(data="x"), "identity is"),
        (lambda e: e[0]["identity"].update(tensor_parallel="1"), "identity.tensor_parallel"),
        (lambda e: e[0]["identity"].update(tensor_parallel=0), "tensor_parallel is 0"),
        (lambda e: e[0].update(more=1), "'extensions' is not as version"),
        (lambda e: e[0].update(fields=[], layers=layers_document([])), "one adds no field"),
        (lambda e: e.append(e[0]), "is stored twice"),
        (lambda e: e[0].pop("complete"), "KeyError"),
        (lambda e: e.clear(), "'extensions' is not as version"),
        (lambda e: e.append(7), "TypeError"),
        (lambda e: e.extend(e * 4000), "4001 are too many"),
    ],
)
def test_what_does_not_fit_is_refused(
    cache: Path, change: Callable[[list], None], words: str
) -> None:
    document = json.loads(manifest_path(cache).read_bytes())
    del document["digest"]
    change(document["extensions"])
    document["digest"] = json_digest(document)
    manifest_path(cache).write_text(json.dumps(document))
    with pytest.raises(IncompatibleCacheError, match="manifest.json: damaged") as refused:
        read_manifest(cache)
    assert words in str(refused.value)


def test_a_field_of_the_first_files_is_not_added(cache: Path) -> None:
    add_extension(cache, layers=(2,))
    with pytest.raises(IncompatibleCacheError, match="'hidden_states.2' is stored twice"):
        read_manifest(cache)
