"""Files are whole or not there, and one live process at a time writes a shard."""

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.durable import is_tmp, replacing, write_at, write_file
from dspark.schemas.leftovers import remove_leftovers
from dspark.schemas.locks import _warn_of_no_locks, is_locked

fork = multiprocessing.get_context("fork")


def in_child(body: Callable[[], object]) -> int:
    """Run ``body`` in a child; its exit code, or minus its signal."""
    child = fork.Process(target=body)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def is_claimed(path: Path) -> bool:
    """Asked by another process."""

    def ask() -> None:
        try:
            Claim(path).close()
        except ClaimedError:
            os._exit(3)

    return in_child(ask) == 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_claim_lasts_from_the_first_byte_to_its_end(tmp_path: Path) -> None:
    shard = tmp_path / "shard-00000-of-00001.safetensors"
    with Claim(shard) as claim:
        claim.file.write(b"data")
        assert is_claimed(shard)
        remove_leftovers(tmp_path)
        claim.publish()
        assert shard.read_bytes() == b"data"
        assert is_claimed(shard), "its index is not written yet"
        assert is_locked(shard)
    assert not is_claimed(shard)
    assert list(tmp_path.iterdir()) == [shard]


def test_what_is_not_published_is_removed(tmp_path: Path) -> None:
    shard = tmp_path / "s.safetensors"
    with pytest.raises(KeyError), Claim(shard) as claim:
        claim.file.write(b"half")
        raise KeyError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("published", [False, True])
def test_a_claim_dies_with_its_process(tmp_path: Path, published: bool) -> None:
    shard = tmp_path / "s.safetensors"

    def body() -> None:
        claim = Claim(shard)
        claim.file.write(b"half")
        if published:
            claim.publish()
        die()

    assert in_child(body) == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == [shard.name + ("" if published else ".tmp")]
    with Claim(shard) as claim:
        claim.file.truncate(0)
        claim.file.write(b"whole")
        claim.publish()
    assert shard.read_bytes() == b"whole"


def test_leftovers_of_the_dead_go_and_files_of_the_living_stay(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    mine = folder / "mine.tmp"
    mine.write_bytes(b"not a name that a capture gives")

    def body() -> None:
        with replacing(folder / "dead.parquet") as file:
            file.write(b"half")
            die()

    assert in_child(body) == -signal.SIGKILL
    assert len([p for p in folder.iterdir() if is_tmp(p)]) == 1
    with replacing(folder / "live.parquet") as file:
        assert in_child(lambda: remove_leftovers(tmp_path)) == 0
        file.write(b"whole")
    assert {p.name for p in folder.iterdir()} == {"mine.tmp", "live.parquet"}
    assert (folder / "live.parquet").read_bytes() == b"whole"


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_file(path, b"old")

    def body() -> None:
        with replacing(path) as file:
            file.write(b"new")
            die()

    assert in_child(body) == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    with pytest.raises(KeyError), replacing(path):
        raise KeyError
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_cleaner_that_looks_at_a_leftover_is_no_rival(tmp_path: Path) -> None:
    shard = tmp_path / "s.safetensors"
    leftover = tmp_path / "s.safetensors.tmp"
    leftover.touch()
    locked = fork.Event()

    def cleaner() -> None:
        with open(leftover, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked.set()
            time.sleep(0.05)
            leftover.unlink()

    child = fork.Process(target=cleaner)
    child.start()
    locked.wait()
    with Claim(shard) as claim:
        claim.publish()
    child.join()
    assert list(tmp_path.iterdir()) == [shard]


def test_many_processes_on_the_same_files(tmp_path: Path) -> None:
    """Claims, deaths, cleaners and small files, interleaved at random for two seconds."""
    shard, small = tmp_path / "s.safetensors", tmp_path / "small.json"
    log = tmp_path / "log"
    log.mkdir()
    end = time.monotonic() + 2

    def body(seed: int) -> None:
        rng = random.Random(seed)
        claims = 0
        while time.monotonic() < end:
            if seed == 0:
                remove_leftovers(tmp_path)
                continue
            if rng.random() < 0.3:
                write_file(small, b"x" * 5000)
                assert len(small.read_bytes()) == 5000
            try:
                claim = Claim(shard)
            except ClaimedError:
                continue
            # Whoever holds the claim is alone: nobody else writes while it sleeps.
            claims += 1
            claim.file.truncate(0)
            claim.file.write(str(seed).encode())
            time.sleep(rng.random() / 500)
            assert _content(claim) == str(seed).encode()
            if rng.random() < 0.5:
                claim.publish()
                assert shard.read_bytes() == str(seed).encode()
                time.sleep(rng.random() / 500)
                assert shard.read_bytes() == str(seed).encode()
            claim.close()
        (log / str(seed)).write_text(str(claims))

    children = [fork.Process(target=body, args=(seed,)) for seed in range(4)]
    for child in children:
        child.start()
    while time.monotonic() < end - 0.2:  # and some die in the middle of it

        def doomed() -> None:
            try:
                Claim(shard).file.write(b"dead")
            except ClaimedError:
                return
            die()

        in_child(doomed)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert sum(int(p.read_text()) for p in log.iterdir()) > 5
    remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} <= {shard.name, small.name, "log"}


def _content(claim: Claim) -> bytes:
    return os.pread(claim.file.fileno(), 100, 0)


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with one warning, and takes no file for a leftover."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    _warn_of_no_locks.cache_clear()
    shard = tmp_path / "s.safetensors"
    with caplog.at_level(logging.WARNING), Claim(shard) as claim:
        remove_leftovers(tmp_path)
        claim.file.write(b"data")
        claim.publish()
    write_file(tmp_path / "small.json", b"1")
    assert shard.read_bytes() == b"data"
    assert [r.message for r in caplog.records] == [
        "dspark: the file system of the cache has no file locks: let no two captures write there "
        "at the same time"
    ]


@pytest.mark.parametrize(("stays", "refuses"), [(True, False), (True, True), (False, False)])
def test_what_is_written_at_a_place_is_begun_to_be_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool, refuses: bool
) -> None:
    """If it stays, and where the file system takes the advice; also of a write in parts."""
    told: list[tuple[int, int, int]] = []
    pwrite = os.pwrite

    def advising(fd: int, offset: int, size: int, advice: int) -> None:
        told.append((offset, size, advice))
        if refuses:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", advising)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    with FileIO(tmp_path / "x", "wb") as file:
        write_at(file, memoryview(b"abcdefgh"), 4, stays=stays)
    assert (tmp_path / "x").read_bytes() == b"\0" * 4 + b"abcdefgh"
    assert told == [(4, 8, os.POSIX_FADV_DONTNEED)] * stays
