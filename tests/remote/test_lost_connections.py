"""What is lost on the way is asked for again; what stays lost or is damaged ends the training."""

import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import object_server
import pytest
import torch
from flipped_bytes import xor_byte
from object_server import ObjectServer
from runs import OPTIONS, assert_same_weights, records
from synthetic_cache import write_cache

import dspark
from dspark.remote import store
from dspark.remote.store import DamagedObjectError, MissingObjectError, UnreachableError
from dspark.schemas.errors import InputError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache import loop

Copied = Callable[[str, str], Path]

TRAINING: dict[str, Any] = {**OPTIONS, "steps": 24}


@pytest.fixture(scope="module")
def trained(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "msd"
    dspark.train_draft(caches / "bucket" / "safetensors", "msd", out, **TRAINING)
    return out


FAULTS = {
    "a body that ends too soon": {"drop_after": 100},
    "an empty body": {"drop_after": 0},
    "errors of the server": {"status": 500},
    "too many requests": {"status": 429},
}


@pytest.mark.parametrize("form", ["safetensors", "zarr"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_connection_is_tried_again(
    caches: Path,
    server: ObjectServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    form: str,
    fault: str,
) -> None:
    remote = dspark.open_cache(f"{server.url}/bucket/{form}", local_cache=tmp_path)
    local = dspark.open_cache(caches / "bucket" / "safetensors")
    fields = list(local.manifest.fields)
    server.control(match="/shards/", times=8, **FAULTS[fault])
    with remote.ahead([[0, 1], [9], [20]], fields) as ahead:
        for rows in ahead:
            for sample in (*rows, 60):  # that one from a shard that is not fetched
                here, there = local[sample], remote[sample]
                assert all(torch.equal(here[name], there[name]) for name in here)
    assert "is tried again for up to" in caplog.text


def test_a_training_goes_on_through_lost_connections(
    server: ObjectServer, trained: Path, tmp_path: Path
) -> None:
    server.control(match="/shards/", times=12, drop_after=100)
    url = f"{server.url}/bucket/zarr"
    dspark.train_draft(url, "msd", tmp_path / "out", local_cache=tmp_path, **TRAINING)
    assert_same_weights(trained, tmp_path / "out")
    assert records(trained) == records(tmp_path / "out")


def test_a_server_that_is_gone_stops_the_training_which_goes_on_later(
    caches: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = object_server.start(caches)
    server.control(match="/shards/", delay=0.05, times=10**6)
    real = loop.step_random
    seen = []

    def killing(seed: int, step: int, batch: Any) -> Any:
        seen.append(step)
        if step == 9:
            server.stop()
        return real(seed, step, batch)

    url = f"{server.url}/bucket/safetensors"
    # So small that steps to come are not here yet.
    given = {"local_cache": tmp_path / "local", "local_cache_size": "300KB", **TRAINING}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "step_random", killing)
        patch.setattr(store, "PATIENCE", 0.5)
        with pytest.raises(UnreachableError, match=rf"{url}/shards/shard-\d+-of-.*--resume"):
            dspark.train_draft(url, "msd", tmp_path / "out", **given)
    assert 9 <= seen[-1] < 23
    again = object_server.start(caches, server.port)
    try:
        dspark.train_draft(url, "msd", tmp_path / "out", resume=True, **given)
    finally:
        again.stop()
    assert_same_weights(trained, tmp_path / "out")
    # Saved where it stopped, not where it was last saved as usual: no step is there twice.
    assert [r["step"] for r in records(tmp_path / "out")] == [0, *range(1, 25), 24]


def test_the_command_says_it_in_a_sentence(tmp_path: Path) -> None:
    program = (
        "import sys; from dspark import cli; from dspark.remote import store\n"
        "store.FIRST_PATIENCE = 1.0; cli.main()"
    )
    command = [
        sys.executable, "-c", program, "inspect", "--cache", "http://127.0.0.1:9/cache",
        "--local-cache", str(tmp_path),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    warning, error = ran.stderr.splitlines()
    assert "is tried again for up to" in warning
    assert error.startswith("dspark: http://127.0.0.1:9/cache/manifest.json: cannot be read")
    assert "Connection refused" in error and error.endswith("is the address right?")


def test_a_server_that_never_answers_is_soon_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        start = time.monotonic()
        with pytest.raises(UnreachableError, match="is the address right"):
            dspark.open_cache(url, local_cache=tmp_path)
    assert time.monotonic() - start < 10


def test_a_server_without_ranges_is_named_as_such(caches: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, cwd=caches, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as plain:
        try:
            assert plain.stdout is not None
            port = plain.stdout.readline().split(" port ")[1].split()[0]
            url = f"http://127.0.0.1:{port}/bucket/zarr"
            cache = dspark.open_cache(url, local_cache=tmp_path)
            with pytest.raises(UnreachableError, match="answers range requests"):
                cache[0]
        finally:
            plain.kill()


def flip(path: Path) -> None:
    xor_byte(path, 4096 + 5 if path.suffix == ".safetensors" else 5, 1)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "inputs_embeds of dataset row 0 is damaged"),
    "truncated": (lambda p: os.truncate(p, 4100), "is damaged"),
    "missing": (Path.unlink, "there is nothing"),
}


@pytest.mark.parametrize("form", ["safetensors", "zarr"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_never_trained_on(
    caches: Path, copied: Copied, server: ObjectServer, tmp_path: Path, form: str, damage: str
) -> None:
    root = copied(form, "damaged")
    name = "shards/shard-00000-of-00024." + (
        "safetensors" if form == "safetensors" else "zarr/inputs_embeds/c.0.0.0"
    )
    do, said = DAMAGES[damage]
    do(root / name)
    url = f"{server.url}/bucket/damaged"
    local = dspark.open_cache(caches / "bucket" / "safetensors")
    kinds = (DamagedObjectError, MissingObjectError)
    remote = dspark.open_cache(url, local_cache=tmp_path / "local")
    with pytest.raises(kinds, match=said) as error:
        remote[0]
    assert "shard-00000-of-00024" in str(error.value)
    with pytest.raises(kinds, match="shard-00000-of-00024"):
        dspark.train_draft(
            url, "msd", tmp_path / "out", local_cache=tmp_path / "local",
            **{**TRAINING, "eval_fraction": 0.0},
        )  # fmt: skip
    units = list(tmp_path.glob("local/*/shards/shard-00000-*/inputs_embeds.*"))
    assert units == []
    assert torch.equal(remote[40]["inputs_embeds"], local[40]["inputs_embeds"])


@pytest.mark.parametrize("name", ["zarr.json", "inputs_embeds/zarr.json"])
def test_metadata_of_zarr_are_compared(
    copied: Copied, server: ObjectServer, tmp_path: Path, name: str
) -> None:
    root = copied("zarr", "metadata")
    path = root / "shards" / "shard-00000-of-00024.zarr" / name
    path.write_text("{}")
    remote = dspark.open_cache(f"{server.url}/bucket/metadata", local_cache=tmp_path)
    with pytest.raises(DamagedObjectError, match="is not the metadata"):
        remote[0]
    path.unlink()
    with pytest.raises(MissingObjectError, match=name):
        remote[0]
    remote[40]


def test_small_files_that_are_damaged(
    caches: Path, copied: Copied, server: ObjectServer, tmp_path: Path
) -> None:
    for name, said in (
        ("manifest.json", "manifest.json: not readable|damaged"),
        ("index/columns.safetensors", "columns.safetensors: damaged"),
        ("target/head.safetensors", "head.safetensors: damaged"),
    ):
        root = copied("zarr", "small")
        url, folder = f"{server.url}/bucket/small", tmp_path / Path(name).stem
        xor_byte(root / name, 300, 1)
        with pytest.raises(InputError, match=said) as error:
            dspark.open_cache(url, local_cache=folder)
        assert f"{url}/{name}" in str(error.value) and str(tmp_path) not in str(error.value)
        # What was mended there is well again here.
        shutil.copy(caches / "bucket" / "zarr" / name, root / name)
        dspark.open_cache(url, local_cache=folder)


def test_an_index_that_is_damaged(
    caches: Path, copied: Copied, server: ObjectServer, tmp_path: Path
) -> None:
    """Its shard alone cannot be read, until it is mended there or here."""
    name, root = "index/shard-00003-of-00024.parquet", copied("zarr", "small")
    url = f"{server.url}/bucket/small"
    local = dspark.open_cache(root)
    xor_byte(root / name, 300, 1)
    remote = dspark.open_cache(url, local_cache=tmp_path)
    assert torch.equal(remote[14]["input_ids"], local[14]["input_ids"])
    with pytest.raises(InputError, match="no sound sample index") as error:
        remote[15]
    assert f"{url}/{name}" in str(error.value) and str(tmp_path) not in str(error.value)
    shutil.copy(caches / "bucket" / "zarr" / name, root / name)
    assert torch.equal(remote[15]["input_ids"], local[15]["input_ids"])
    (here,) = tmp_path.glob(f"*/{name}")
    xor_byte(here, 300, 1)
    again = dspark.open_cache(url, local_cache=tmp_path)
    assert torch.equal(again[15]["input_ids"], local[15]["input_ids"])


def test_an_index_that_lists_other_rows_than_the_columns(
    caches: Path, server: ObjectServer, tmp_path: Path
) -> None:
    root = write_cache(caches / "bucket" / "other", samples=6, shards=2)
    manifest = read_manifest(root)
    paths = CachePaths(root, 2)
    table, facts = read_index(paths, manifest, 1)
    rows = [IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist()]
    rows[0] = replace(rows[0], length=rows[0].length - 1)
    write_index(paths.index(1), rows, facts)
    remote = dspark.open_cache(f"{server.url}/bucket/other", local_cache=tmp_path)
    assert len(remote[0]["input_ids"]) == remote.lengths[0]
    with pytest.raises(InputError, match="lists other rows than columns.safetensors"):
        remote[4]


def test_a_killed_reader_leaves_nothing_broken(
    caches: Path, server: ObjectServer, tmp_path: Path
) -> None:
    program = (
        "import sys, dspark\n"
        "cache = dspark.open_cache(sys.argv[1], local_cache=sys.argv[2])\n"
        "batches = [[i] for i in range(len(cache))]\n"
        "with cache.ahead(batches, list(cache.manifest.fields)) as ahead:\n"
        "    for rows in ahead: cache[rows[0]]\n"
    )
    url = f"{server.url}/bucket/safetensors"
    server.control(match="/shards/", delay=0.05, times=10**6)
    process = subprocess.Popen(
        [sys.executable, "-c", program, url, str(tmp_path)], stderr=subprocess.PIPE
    )
    while len(list(tmp_path.glob("*/shards/*/*.safetensors"))) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    came = list(tmp_path.glob("*/shards/*/*.safetensors"))
    server.control(forget=1)
    cache, local = (
        dspark.open_cache(url, local_cache=tmp_path),
        dspark.open_cache(caches / "bucket" / "safetensors"),
    )
    with cache.ahead([[i] for i in range(len(cache))], list(cache.manifest.fields)) as ahead:
        for (sample,) in ahead:
            here, there = local[sample], cache[sample]
            assert all(torch.equal(here[name], there[name]) for name in here)
    assert not list(tmp_path.glob("*/shards/*/*.tmp"))
    sent = sum(server.control()["sent"].values())
    whole = sum(p.stat().st_blocks * 512 for p in tmp_path.glob("*/shards/*/*"))
    assert came and sent < whole  # what was there is used


def test_waiting_ends_when_the_training_is_interrupted(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE", 600.0)
    monkeypatch.setattr(store, "_PAUSE", 60.0)
    cache = dspark.open_cache(f"{server.url}/bucket/safetensors", local_cache=tmp_path)
    server.control(match="/shards/", status=500, times=10**6)
    start = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        cache.ahead([[i] for i in range(20)], list(cache.manifest.fields)) as ahead,
    ):
        next(iter(ahead))
        time.sleep(0.3)
        raise KeyboardInterrupt
    assert time.monotonic() - start < 20


def test_nothing_secret_is_printed(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key")
    server.control(match="bucket/zarr", status=403, times=10**6)
    with pytest.raises(UnreachableError, match="AWS_ACCESS_KEY_ID") as error:
        dspark.open_cache("s3://bucket/zarr", local_cache=tmp_path)
    for text in (str(error.value), caplog.text):
        assert "the-secret-key" not in text and "the-access-key" not in text
