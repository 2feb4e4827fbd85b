"""Real file systems that are small, can be lost, or fail; a test without the right is skipped."""

import fcntl
import gc
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_FLUSH = struct.pack("I", 2)


def mount(point: Path, *arguments: str) -> None:
    """Mount at ``point``, or skip the test where that is not permitted."""
    point.mkdir(parents=True, exist_ok=True)
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")


def unmount(point: Path) -> None:
    subprocess.run(["umount", "--lazy", str(point)], check=True, capture_output=True)


@contextmanager
def tmpfs(point: Path, size: int) -> Iterator[Path]:
    """A file system in memory that holds so many bytes."""
    mount(point, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")
    try:
        yield point
    finally:
        unmount(point)


@contextmanager
def ext4(point: Path, size: int, *options: str) -> Iterator[Callable[[], None]]:
    """An ext4 in a file beside ``point``; the function fails its device for ever."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image = point.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, str(image)], check=True, capture_output=True)
    mount(point, "-o", "loop", str(image))

    def fail() -> None:
        fd = os.open(point, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUTDOWN, _NO_FLUSH)
        os.close(fd)

    try:
        yield fail
    finally:
        gc.collect()  # an open file, kept by an error's traceback, would keep the failed disk
        unmount(point)
        _wait_until_free(image)


def _wait_until_free(image: Path) -> None:
    """A lazy unmount ends later; mounted before that, the same failed disk would come back."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        used = subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True)
        if not used.stdout.strip():
            return
        time.sleep(0.05)
