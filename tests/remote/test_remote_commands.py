"""The commands on a URL: what they say, fetch and refuse."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flipped_bytes import xor_byte
from object_server import ObjectServer
from runs import OPTIONS
from typer.testing import CliRunner

import dspark
from dspark.cli import app
from dspark.schemas.errors import InputError
from dspark.verify.run import verify_cache

Copied = Callable[[str, str], Path]

FORMS = ["safetensors", "zarr"]
SHARD = {
    "safetensors": "shards/shard-00002-of-00024.safetensors",
    "zarr": "shards/shard-00002-of-00024.zarr/inputs_embeds/c.0.0.0",
}


def run(*args: str) -> Any:
    """The exit code and what was printed; errors that users can mend are raised."""
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    return result.exit_code, result.stdout


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_verify_says_that_it_is_sound(
    server: ObjectServer, tmp_path: Path, form: str, deep: bool
) -> None:
    url = f"{server.url}/bucket/{form}"
    code, said = run(
        "verify", "--cache", url, "--local-cache", str(tmp_path), *(["--deep"] if deep else [])
    )
    assert code == 0, said
    assert f"{url}: sound" in said and str(tmp_path) not in said
    assert not list(tmp_path.iterdir())
    if not deep:
        heads = [n for n in server.control()["requests"] if n.startswith("HEAD") and "shard" in n]
        assert len(heads) >= 24


def flipped(path: Path) -> None:
    xor_byte(path, 4096 + 5 if path.suffix == ".safetensors" else 5, 1)


@pytest.mark.parametrize(
    ("damage", "deep"),
    [(Path.unlink, False), (lambda p: os.truncate(p, 10), False), (flipped, True)],
)
@pytest.mark.parametrize("form", FORMS)
def test_verify_names_what_it_would_name_in_a_directory(
    copied: Copied,
    server: ObjectServer,
    tmp_path: Path,
    form: str,
    damage: Callable[[Path], None],
    deep: bool,
) -> None:
    root = copied(form, "verified")
    damage(root / SHARD[form])
    local = verify_cache(root, deep=deep)
    remote = verify_cache(f"{server.url}/bucket/verified", deep=deep, local_cache=tmp_path)
    assert remote.exit_code == local.exit_code == 1
    assert remote.faults == local.faults and remote.faults
    assert (remote.shards, remote.rows) == (local.shards, local.rows)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "index/shard-00001-of-00024.parquet", "index/columns.safetensors"],
)
def test_verify_names_damaged_small_files(
    copied: Copied, server: ObjectServer, tmp_path: Path, name: str
) -> None:
    root = copied("zarr", "verified")
    xor_byte(root / name, 300, 1)
    code, said = run(
        "verify", "--cache", f"{server.url}/bucket/verified", "--local-cache", str(tmp_path)
    )
    assert code == 1 and f"{name}: " in said
    assert "copy what is damaged there once more" in said


def test_inspect_fetches_no_shard(
    caches: Path, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/bucket/zarr"
    code, said = run("inspect", "--cache", url, "--local-cache", str(tmp_path), "--json")
    assert code == 0
    local = json.loads(run("inspect", "--cache", str(caches / "bucket" / "zarr"), "--json")[1])
    found = json.loads(said)
    for key in ("fields", "counts", "complete", "shard_format", "num_samples", "real_bytes"):
        assert found[key] == local[key]
    assert found["path"] == url
    asked = {Path(name).name for name in server.control()["requests"]}
    assert asked == {"manifest.json", "columns.safetensors"}
    code, said = run("inspect", "--cache", url, "--local-cache", str(tmp_path))
    assert code == 0 and f"{url}: " in said and f"of the cache are in {tmp_path}" in said


def test_evaluate_gives_the_same_from_a_url(
    caches: Path, server: ObjectServer, tmp_path: Path
) -> None:
    root = caches / "bucket" / "safetensors"
    draft = tmp_path / "draft"
    dspark.train_draft(root, "msd", draft, **{**OPTIONS, "steps": 2})
    url = f"{server.url}/bucket/safetensors"
    told = [
        json.loads(run("evaluate", "--cache", where, "--draft", str(draft), "--json", *more)[1])
        for where, more in (
            (str(root), []),
            (url, ["--local-cache", str(tmp_path / "local"), "--local-cache-size", "1MB"]),
        )
    ]
    assert [t.pop("cache") for t in told] == [str(root), url]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["verify", "--cache", "s3://b/c", "--repair"],
            "--repair --cache s3://b/c: must be a path",
        ),
        (
            ["verify", "--cache", "s3://b/c", "--against", "T"],
            "--against --cache s3://b/c: must be",
        ),
        (
            ["capture", "--shards", "2", "--out", "s3://b/c"],
            "--out s3://b/c: must be a path; .*copy",
        ),
        (["capture", "--extend", "--layers", "0", "--out", "s3://b/c"], "--out s3://b/c: must be"),
        (["convert", "--cache", "s3://b/c", "--to", "x", "--format", "zarr"], "--cache s3://b/c: "),
        (["train-draft", "--cache", "x", "--arch", "msd", "--out", "s3://b/c"], "--out s3://b/c: "),
        (
            ["train-draft", "--cache", "x", "--arch", "msd", "--arch", "eagle3", "--out", "s3://b"],
            "--out s3://b: must be",
        ),
        (
            ["train-draft", "--cache", "x", "--arch", "msd", "--init-from", "s3://b/c"],
            "--init-from s3://b/c: must be a path; copy it",
        ),
        (["evaluate", "--cache", "x", "--draft", "http://b/c"], "--draft http://b/c: must be"),
        (["convert", "--cache", "x", "--to", "gs://b/c", "--format", "zarr"], "--to gs://b/c: "),
    ],
)
def test_what_writes_takes_no_url(args: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(*args)
