"""Errors of a disk get one sentence with the path and the way out."""

import errno
import os
from pathlib import Path

import pytest
import torch
from mounts import tmpfs
from safetensors.torch import save_file

from dspark.schemas.disk_errors import disk_error, os_errors
from dspark.schemas.durable import names


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        ("ENOSPC", "make room"),
        ("EDQUOT", "make room"),
        ("EFBIG", "ulimit -f"),
        ("EROFS", "make it writable"),
        ("EACCES", "make it writable"),
        ("EIO", "bring the disk or the mount back"),
        ("ESTALE", "bring the disk or the mount back"),
        ("ENOTCONN", "bring the disk or the mount back"),
        ("ENODEV", "bring the disk or the mount back"),
        ("EISDIR", "out of the way"),
        ("EEXIST", "out of the way"),
        ("ENAMETOOLONG", "shorter name"),
    ],
)
def test_path_and_way_out(code: str, way_out: str) -> None:
    number = getattr(errno, code)
    said = disk_error(OSError(number, os.strerror(number), "/cache/shards/x"))
    assert said is not None
    assert said.startswith(f"/cache/shards/x: {os.strerror(number)}; what is committed stays")
    assert way_out in said
    assert "the same command again" in said


def test_other_errors_are_not_explained_away() -> None:
    assert disk_error(OSError(errno.EINVAL, "Invalid argument", "/cache/shards/x")) is None
    assert disk_error(OSError("no code at all")) is None


def test_a_renaming_names_the_place_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x.tmp").touch()
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        os.replace(tmp_path / "x.tmp", tmp_path / "x")
    said = disk_error(error.value)
    assert said is not None
    assert said.startswith(f"{tmp_path / 'x'}: Is a directory")


def test_an_open_file_has_a_name(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_CREAT | os.O_RDONLY)
    with pytest.raises(OSError, match="x") as error, names(tmp_path / "x"):
        os.pwrite(fd, b"1", 0)
    os.close(fd)
    assert error.value.filename == str(tmp_path / "x")


def test_what_libraries_say_is_understood(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 16) as small:
        with pytest.raises(OSError, match="No space left") as error, os_errors(small):
            save_file({"x": torch.ones(1 << 16)}, small / "x.safetensors")
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == str(small)
    with pytest.raises(KeyError), os_errors(tmp_path):
        raise KeyError
