"""A cache at a URL is the cache: the same rows, the same training, and no byte fetched twice."""

import math
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from flipped_bytes import xor_byte
from object_server import ObjectServer
from runs import CONFIG, OPTIONS, assert_same_weights, records
from safetensors import safe_open
from synthetic_cache import add_extension, write_cache

import dspark
from dspark.convert.run import convert
from dspark.remote import store
from dspark.schemas.errors import InputError
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.cache import Cache, ok_rows
from dspark.train_from_cache.split import split_rows

FORMS = ["safetensors", "zarr"]
ARCHS = ["msd", "eagle3"]
CONFIGS = {k: v for k, v in CONFIG.items() if k.split(".")[0] in ARCHS}
TRAINING: dict[str, Any] = {**OPTIONS, "steps": 30, "log_every": 10, "draft_config": CONFIGS}


@pytest.fixture(scope="module")
def trained(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training that those from a URL must equal, from the directory."""
    out = tmp_path_factory.mktemp("trained")
    dspark.train_drafts(caches / "bucket" / "safetensors", ARCHS, out, **TRAINING)
    return out


def assert_same_training(one: Path, two: Path, archs: Sequence[str]) -> None:
    for arch in archs:
        assert_same_weights(one / arch, two / arch)
        assert records(one / arch) == records(two / arch)


def _training(archs: Sequence[str]) -> dict[str, Any]:
    entries = {k: v for k, v in CONFIGS.items() if k.split(".")[0] in archs}
    return {**TRAINING, "draft_config": entries}


def real_bytes(cache: Cache, fields: set[str]) -> int:
    chosen = [f for f in cache.manifest.all_fields if f.name in fields]
    return sum(f.token_bytes for f in chosen) * int(cache.lengths.sum())


def shard_bytes(server: ObjectServer) -> int:
    return sum(n for name, n in server.control()["sent"].items() if "/shards/" in name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", ["file", "http", "s3"])
def test_rows_are_those_of_the_directory(
    caches: Path, server: ObjectServer, s3: None, tmp_path: Path, form: str, scheme: str
) -> None:
    url = {
        "file": f"file://{caches}/bucket/{form}",
        "http": f"{server.url}/bucket/{form}/",
        "s3": f"s3://bucket/{form}",
    }[scheme]
    local = dspark.open_cache(caches / "bucket" / "safetensors")
    remote = dspark.open_cache(url, local_cache=tmp_path)
    for cache in (remote, pickle.loads(pickle.dumps(remote))):
        assert len(cache) == len(local) and (cache.lengths == local.lengths).all()
        for sample in range(0, len(local), 29):
            here, there = local[sample], cache[sample]
            assert here.keys() == there.keys()
            assert all(torch.equal(here[name], there[name]) for name in here)
    # Rows one by one are not worth a shard.
    assert not list(tmp_path.glob("*/shards/*/*"))


@pytest.mark.parametrize(("scheme", "archs"), [("http", ARCHS), ("s3", ARCHS[:1])])
def test_training_with_a_local_cache_smaller_than_the_data(
    caches: Path,
    server: ObjectServer,
    s3: None,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    archs: list[str],
) -> None:
    monkeypatch.setattr(store, "_COALESCE", 0)
    url = f"{server.url}/bucket/safetensors" if scheme == "http" else "s3://bucket/safetensors"
    size = _size_of(caches, 18, archs, tmp_path / "measured")
    unsigned = server.control(forget=1)["unsigned"]
    most = _most_on_disk(tmp_path / "local")
    dspark.train_drafts(
        url, archs, tmp_path / "out",
        local_cache=tmp_path / "local", local_cache_size=size, **_training(archs),
    )  # fmt: skip
    assert_same_training(trained, tmp_path / "out", archs)
    assert most() <= size
    cache = dspark.open_cache(caches / "bucket" / "safetensors")
    train, held_out = split_rows(ok_rows(cache), TRAINING["eval_fraction"])
    epochs = TRAINING["steps"] * TRAINING["batch_size"] / len(train)
    # An epoch fetches shards, held-out rows included; two evaluations read those alone.
    evaluations = 2 * len(held_out) / (len(train) + len(held_out))
    passes = math.ceil(epochs) + evaluations
    assert shard_bytes(server) <= passes * real_bytes(cache, _fields(archs))
    if scheme == "s3":
        assert server.control()["unsigned"] == unsigned


def _fields(archs: Sequence[str]) -> set[str]:
    """What the drafts read."""
    fields = {"inputs_embeds", "last_hidden_state", "input_ids", "loss_mask", "image_mask"}
    return fields | ({f"hidden_states.{k}" for k in (0, 1, 2)} if "eagle3" in archs else set())


def _size_of(caches: Path, shards: int, archs: Sequence[str], folder: Path) -> int:
    """What so many shards take in a local cache."""
    url = f"file://{caches}/bucket/safetensors"
    cache = dspark.open_cache(url, local_cache=folder)
    assert cache._mirror is not None
    largest = max(
        sum(cache._mirror.wanted(name, shard).bytes for name in _fields(archs))
        for shard in range(cache.manifest.num_shards)
    )
    return shards * largest


def _most_on_disk(folder: Path) -> Any:
    """Looks at ``folder`` until it is asked what its shards took at most."""
    stop, most = threading.Event(), [0]

    def look() -> None:
        while not stop.wait(0.005):
            sizes = []
            for path in folder.glob("*/shards/*/*"):
                try:
                    sizes.append(path.stat().st_blocks * 512)
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], sum(sizes))

    thread = threading.Thread(target=look)
    thread.start()

    def asked() -> int:
        stop.set()
        thread.join()
        return most[0]

    return asked


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_by_several_epochs_is_fetched_once_where_there_is_room(
    caches: Path,
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    monkeypatch.setattr(store, "_COALESCE", 0)
    cache = dspark.open_cache(f"{server.url}/bucket/{form}", local_cache=tmp_path)
    local = dspark.open_cache(caches / "bucket" / "safetensors")
    fields = [cache.field(name) for name in ("inputs_embeds", "input_ids")]
    server.control(forget=1)
    for _ in range(3):
        batches = [list(range(start, start + 6)) for start in range(0, len(cache), 6)]
        with cache.ahead(batches, fields) as ahead:
            assert [list(rows) for rows in ahead] == batches
    # The reader may have left before the last ones came.
    units = list(tmp_path.glob("*/shards/*/*.safetensors"))
    assert len(units) == 2 * cache.manifest.num_shards
    objects = [n for n in server.control()["sent"] if "/shards/" in n]
    names = {f.name for f in fields}
    if form == "safetensors":
        assert shard_bytes(server) == real_bytes(local, names)
    else:
        # Nothing but the two fields, and of each its index and its chunks.
        objects = [n for n in objects if not n.endswith("zarr.json")]
        sizes = {n: (caches / n).stat().st_size for n in objects}
        assert all(n.split("/")[-2] in names for n in objects)
        sent = server.control()["sent"]
        assert {n: sent[n] for n in objects} == sizes
    for shard in (0, 7):
        for name in names:
            (unit,) = tmp_path.glob(f"*/shards/shard-{shard:05d}-*/{name}.safetensors")
            paths = CachePaths(local.root, local.manifest.num_shards)
            with safe_open(unit, "pt") as got, safe_open(paths.shard(shard), "pt") as want:
                assert list(got.keys()) == [name]
                assert torch.equal(got.get_tensor(name), want.get_tensor(name))


def test_a_local_cache_smaller_than_a_window_reads_rows_one_by_one(
    caches: Path,
    server: ObjectServer,
    trained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = _size_of(caches, 3, ["msd"], tmp_path / "measured")
    dspark.train_drafts(
        f"{server.url}/bucket/zarr", ["msd"], tmp_path / "out",
        local_cache=tmp_path / "local", local_cache_size=size, **_training(["msd"]),
    )  # fmt: skip
    assert_same_training(trained, tmp_path / "out", ["msd"])
    assert "no room for all shards" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_smaller_forms_and_batches_as_long_as_their_rows(
    caches: Path, server: ObjectServer, tmp_path: Path, form: str
) -> None:
    """8 bits and pictures alone, a draft that needs them decoded, trimmed and bucketed batches."""
    name = f"smaller-{form}"
    root = caches / "bucket" / name
    source = root if form == "safetensors" else caches / "smaller"
    write_cache(source, samples=40, shards=8, dtype="fp8", embeds="pictures")
    if form == "zarr":
        convert(str(source), str(root), format="zarr", num_workers=1)
    training = {**_training(ARCHS), "steps": 8, "trim": True, "bucket": True}
    dspark.train_drafts(source, ARCHS, tmp_path / "want", **training)
    dspark.train_drafts(
        f"{server.url}/bucket/{name}", ARCHS, tmp_path / "got",
        local_cache=tmp_path / "local", **training,
    )  # fmt: skip
    assert_same_training(tmp_path / "want", tmp_path / "got", ARCHS)
    assert list(tmp_path.glob("local/*/shards/*/inputs_embeds.scale.safetensors"))


def test_opening_asks_for_no_shard_whatever_their_number(
    caches: Path, server: ObjectServer, tmp_path: Path
) -> None:
    write_cache(caches / "bucket" / "many", samples=400, shards=400, layers=[0], lengths=[9] * 400)
    server.control(forget=1)
    remote = dspark.open_cache(f"{server.url}/bucket/many", local_cache=tmp_path)
    asked = server.control()["requests"]
    names = ("manifest.json", "index/columns.safetensors", "target/head.safetensors")
    assert {n.partition("bucket/many/")[2] for n in asked} == {*names}
    server.control(forget=1)
    remote[123]
    remote[123]
    asked = {n.partition("bucket/many/")[2]: k for n, k in server.control()["requests"].items()}
    assert {n for n in asked if n.startswith("index/")} == {"index/shard-00123-of-00400.parquet"}
    again = dspark.open_cache(f"{server.url}/bucket/many", local_cache=tmp_path)
    server.control(forget=1)
    again[123]
    assert not [n for n in server.control()["requests"] if "/index/" in n]


def test_extensions_are_read_as_well(server: ObjectServer, caches: Path, tmp_path: Path) -> None:
    root = write_cache(caches / "bucket" / "extended", samples=20, shards=2, layers=[0])
    add_extension(root, layers=[2], logits="topk:3")
    remote = dspark.open_cache(f"{server.url}/bucket/extended", local_cache=tmp_path)
    local = dspark.open_cache(root)
    fields = list(local.manifest.all_fields)
    with remote.ahead([[0, 1], [12, 13]], fields) as ahead:
        for rows in ahead:
            for sample in rows:
                here, there = local[sample], remote[sample]
                assert here.keys() == there.keys()
                assert all(torch.equal(here[name], there[name]) for name in here)
    assert list(tmp_path.glob("*/shards/*.plus1/hidden_states.2.safetensors"))


def test_processes_share_a_local_cache(
    caches: Path, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, dspark; from dspark.remote import store; store._COALESCE = 0\n"
        "cache = dspark.open_cache(sys.argv[1], local_cache=sys.argv[2])\n"
        "batches = [list(range(i, i + 6)) for i in range(0, len(cache), 6)]\n"
        "import torch; local = dspark.open_cache(sys.argv[3])\n"
        "fields = [cache.field('inputs_embeds')]\n"
        "with cache.ahead(batches, fields) as ahead:\n"
        "    for rows in ahead:\n"
        "        for i in rows:\n"
        "            out = torch.empty(int(cache.lengths[i]), 16)\n"
        "            cache.read_row(i, fields[0], out)\n"
        "            assert torch.equal(out, local[i]['inputs_embeds']), i\n"
    )
    root = caches / "bucket" / "safetensors"
    command = [
        sys.executable, "-c", program, f"{server.url}/bucket/safetensors", str(tmp_path), str(root)
    ]  # fmt: skip
    server.control(match="/shards/", delay=0.01, times=10**6)
    with ThreadPoolExecutor(2) as pool:
        ran = list(
            pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2))
        )
    assert [r.returncode for r in ran] == [0, 0], ran
    assert shard_bytes(server) == real_bytes(dspark.open_cache(root), {"inputs_embeds"})


def test_a_cache_that_was_changed_has_another_mirror(server: ObjectServer, caches: Path) -> None:
    folder = caches / "local"
    url = f"{server.url}/bucket/changing"
    for seed in (1, 2):
        root = caches / "bucket" / "changing"
        shutil.rmtree(root, ignore_errors=True)
        write_cache(root, samples=6, shards=2, seed=seed)
        remote, local = dspark.open_cache(url, local_cache=folder), dspark.open_cache(root)
        with remote.ahead([[0], [1]], [remote.field("input_ids")]) as ahead:
            list(ahead)
        assert torch.equal(remote[1]["input_ids"], local[1]["input_ids"])
    assert len(list(folder.glob("*/manifest.json"))) == 2


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("ftp://host/cache", "choose a path or a URL of s3://"),
        ("https://name:password@host/cache", "environment variables"),
        ("s3://", "give the URL of the folder"),
        ("https://host/cache?token=1", "give the URL of the folder"),
        ("file:///nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("file://host/cache", "three slashes"),
        ("FTP://host/cache", "choose a path or a URL of s3://"),
        ("http://host//cache", "two slashes"),
        ("S3://bucket/a//b", "two slashes"),
        ("http:/host/cache", "did you mean http://host/cache[?]"),
        ("S3:/bucket/cache", "did you mean s3://bucket/cache[?]"),
        ("file:/nowhere", "did you mean file:///nowhere[?]"),
    ],
)
def test_urls_that_cannot_be(location: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as error:
        dspark.open_cache(location, local_cache=tmp_path)
    assert ":password" not in str(error.value)


def test_other_ways_to_write_a_url(caches: Path, server: ObjectServer, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    (caches / "of a bucket").symlink_to(caches / "bucket")
    for url in (
        f"HTTP://127.0.0.1:{port}/bucket/zarr/",
        f"FILE://{caches}/bucket/zarr",
        f"file://{caches}/of%20a%20bucket/zarr",
    ):
        assert len(dspark.open_cache(url, local_cache=tmp_path)[0]["input_ids"])


def test_target_files_that_changed_here_are_fetched_again(
    caches: Path, server: ObjectServer, tmp_path: Path
) -> None:
    url = f"{server.url}/bucket/zarr"
    dspark.open_cache(url, local_cache=tmp_path)
    (head,) = tmp_path.glob("*/target/head.safetensors")
    sound = head.read_bytes()
    xor_byte(head, 300, 1)
    dspark.open_cache(url, local_cache=tmp_path)
    assert head.read_bytes() == sound


@pytest.mark.parametrize("size", ["none", "0", "-1GB", "12 parsecs", "1iB"])
def test_sizes_that_are_none(size: str, caches: Path, tmp_path: Path) -> None:
    url = f"file://{caches}/bucket/safetensors"
    with pytest.raises(InputError, match="--local-cache-size"):
        dspark.open_cache(url, local_cache=tmp_path, local_cache_size=size)


def test_a_path_has_no_local_cache(caches: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--local-cache .* is for a cache at a URL"):
        dspark.open_cache(caches / "bucket" / "safetensors", local_cache=tmp_path)


def test_a_local_cache_that_cannot_be_written_to(caches: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--local-cache .*file: "):
        dspark.open_cache(f"file://{caches}/bucket/zarr", local_cache=tmp_path / "file")


def test_without_obstore_it_says_what_to_install(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(InputError, match="install dspark with the extra 'remote'"):
        dspark.open_cache(f"file://{caches}/bucket/zarr", local_cache=tmp_path)
