"""Room in a local cache: who gets it, and whose shard goes."""

import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.remote.local_cache import LocalCache, Reservation, Wanted
from dspark.remote.size import parse_size

UNIT = 64 << 10


def wanted(folder: Path, number: int) -> Wanted:
    """A file of 1 MiB, of which the first 64 KiB will be written."""
    path = folder / "mirror" / "shards" / f"shard-{number}" / "field.safetensors"
    return Wanted(path, 1 << 20, [(0, UNIT)])


def fetch(cache: LocalCache, number: int, keep: set[Path] | None = None) -> Wanted | None:
    unit = wanted(cache.folder, number)
    reserved = cache.reserve([unit], (keep or set()).__contains__)
    if reserved is None:
        return None
    for reservation in reserved:
        reservation.file.write(b"x" * UNIT)
        reservation.publish()
        reservation.close()
    return unit


def there(cache: LocalCache) -> list[int]:
    return sorted(int(p.parent.name[6:]) for p in cache.folder.glob("*/shards/*/*"))


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    """One with room for three units."""
    return LocalCache(tmp_path, 3 * wanted(tmp_path, 0).bytes)


def use(unit: Wanted | None, time: int) -> None:
    assert unit is not None
    os.utime(unit.path, (time, time))


def test_what_was_used_longest_ago_goes(cache: LocalCache) -> None:
    for number, time in ((0, 30), (1, 10), (2, 20)):
        use(fetch(cache, number), time)
    fetch(cache, 3)
    assert there(cache) == [0, 2, 3]
    fetch(cache, 4)
    assert there(cache) == [0, 3, 4]
    assert cache.used() <= cache.limit


def test_what_is_needed_stays(cache: LocalCache) -> None:
    units = [fetch(cache, number) for number in range(3)]
    for unit in units:
        use(unit, 10)
    kept = {unit.path for unit in units[:2] if unit}
    assert fetch(cache, 3, kept) is not None
    assert there(cache) == [0, 1, 3]
    assert fetch(cache, 4, kept | {wanted(cache.folder, 3).path}) is None
    assert there(cache) == [0, 1, 3]
    assert not list(cache.folder.glob("**/*.tmp"))


def test_whoever_has_a_shard_open_reads_on(cache: LocalCache) -> None:
    unit = fetch(cache, 0)
    assert unit is not None
    with FileIO(unit.path) as file:
        for number in range(1, 5):
            fetch(cache, number)
        assert not unit.path.exists()
        assert file.read(UNIT) == b"x" * UNIT


def reserve(cache: LocalCache, number: int) -> list[Reservation]:
    reserved = cache.reserve([wanted(cache.folder, number)], lambda _: True)
    assert reserved is not None
    return reserved


def test_room_is_taken_before_the_bytes_come(cache: LocalCache) -> None:
    first, second = reserve(cache, 0), reserve(cache, 1)
    assert cache.used() >= 2 * UNIT
    # Padding takes none.
    assert cache.used() < 3 * UNIT
    assert reserve(cache, 0) == []  # somebody fetches it already
    third = reserve(cache, 2)
    assert cache.reserve([wanted(cache.folder, 3)], lambda _: True) is None
    for reservation in (*first, *second, *third):
        reservation.close()
    assert cache.used() == 0


def test_what_a_killed_process_left_is_removed(cache: LocalCache) -> None:
    program = (
        "import os, sys, signal; from pathlib import Path\n"
        "from dspark.remote.local_cache import LocalCache, Wanted\n"
        "cache = LocalCache(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "unit = Wanted(Path(sys.argv[3]), 1 << 20, [(0, 65536)])\n"
        "assert cache.reserve([unit], lambda _: True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = wanted(cache.folder, 9).path
    command = [sys.executable, "-c", program, str(cache.folder), str(cache.limit), str(path)]
    assert subprocess.run(command).returncode == -9
    assert cache.used() >= UNIT
    for number in range(3):
        assert fetch(cache, number) is not None
    assert there(cache) == [0, 1, 2]


def test_without_a_size_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path)
    disk = os.statvfs(tmp_path)
    assert 0 <= cache.limit < disk.f_bavail * disk.f_frsize


@given(st.integers(1, 10**6), st.sampled_from(["", "K", "M", "G", "T"]), st.booleans())
def test_sizes(number: int, unit: str, binary: bool) -> None:
    base = 1024 if binary and unit else 1000
    factor = base ** " KMGT".index(unit or " ")
    text = f"{number}{unit}{'i' if binary and unit else ''}"
    assert parse_size("--size", f"{text}B") == parse_size("--size", text) == number * factor
    assert parse_size("--size", f"{text} ".lower()) == number * factor


def test_sizes_with_a_fraction() -> None:
    assert parse_size("--size", "1.5TB") == 1_500_000_000_000
    assert parse_size("--size", 4096) == 4096
