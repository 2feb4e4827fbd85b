"""A cache of 24 shards in both forms, and servers of it."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import object_server
from object_server import ObjectServer
from synthetic_cache import write_cache

from dspark.convert.run import convert
from dspark.remote import store

SHARDS = 24


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bucket/safetensors`` and ``bucket/zarr``, the same cache; 5 rows a shard."""
    root = tmp_path_factory.mktemp("caches")
    source = write_cache(root / "bucket" / "safetensors", samples=5 * SHARDS, shards=SHARDS)
    convert(source, root / "bucket" / "zarr", format="zarr", num_workers=1)
    return root


@pytest.fixture
def copied(caches: Path) -> Callable[[str, str], Path]:
    """``copied(form, name)`` is ``bucket/name``, a new copy of the cache in a form, to damage."""

    def copy(form: str, name: str) -> Path:
        root = caches / "bucket" / name
        shutil.rmtree(root, ignore_errors=True)
        return shutil.copytree(caches / "bucket" / form, root)

    return copy


@pytest.fixture(scope="session")
def _server(caches: Path) -> Iterator[ObjectServer]:
    server = object_server.start(caches)
    yield server
    server.stop()


@pytest.fixture
def server(_server: ObjectServer) -> ObjectServer:
    """An HTTP server of ``caches`` that fails in nothing yet."""
    _server.control(forget=1)
    _server.control()
    return _server


@pytest.fixture
def s3(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which ``s3://bucket`` is that of the server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost connections are given up sooner, and there is no local cache but that of a test."""
    monkeypatch.setattr(store, "PATIENCE", 3.0)
    monkeypatch.setattr(store, "FIRST_PATIENCE", 1.0)
    monkeypatch.setattr(store, "_PAUSE", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent/cache")
