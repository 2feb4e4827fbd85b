"""A disk that fills up, fails or goes away stops a capture cleanly; the same command goes on."""

import hashlib
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from conversation_data import mixed_rows, write_rows
from mounts import ext4, mount, tmpfs, unmount

import dspark
from dspark.cli import main

SHARDS = 6


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in root.rglob("*")
        if p.is_file()
    }


def committed(out: Path) -> int:
    return len(list((out / "index").glob("*.parquet")))


def disk_bytes(root: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in root.rglob("*"))


@pytest.fixture(scope="module")
def arguments(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    data = write_rows(tmp_path_factory.mktemp("disk") / "d.parquet", mixed_rows(36))
    return [
        *("capture", "--shards", str(SHARDS), "--batch-tokens", "300"),
        *("--target", str(tiny_target("qwen2_5_vl")), "--data", str(data)),
    ]


@pytest.fixture
def capture(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """``capture(out)`` runs the command in this process: its exit code and its sentence.

    ``capture(out, 2, action)`` does something as soon as two shards are committed.
    """

    def run(
        out: Path, shards: int = 0, action: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        def watch() -> None:
            while committed(out) < shards:
                time.sleep(0.001)
            action()

        Thread(target=watch, daemon=True).start()
        monkeypatch.setattr(sys, "argv", ["dspark", *arguments, "--out", str(out)])
        with pytest.raises(SystemExit) as stop:
            main()
        lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
        said = [line for line in lines if line.startswith("dspark:")]
        assert not any("Traceback" in line for line in lines)
        return int(stop.value.code or 0), "\n".join(said)

    return run


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "cache"
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    dspark.capture(
        SHARDS, batch_tokens=300, target=given["--target"], data=given["--data"], out=str(out)
    )
    return out


def stopped_cleanly(code: int, said: str, out: Path, words: str) -> None:
    assert code == 1, said
    assert len(said.splitlines()) == 1
    assert words in said
    assert str(out) in said
    assert "the same command" in said
    assert 0 < committed(out) < SHARDS
    assert not list(out.rglob("*.tmp"))


def test_a_full_disk(capture: Callable[..., tuple[int, str]], whole: Path, tmp_path: Path) -> None:
    bigger = tmp_path / "bigger"
    with tmpfs(tmp_path / "small", int(0.7 * disk_bytes(whole))) as small:
        code, said = capture(small / "cache")
        stopped_cleanly(code, said, small / "cache", "No space left on device")
        assert "make room" in said
        before = digests(small / "cache")
        subprocess.run(["cp", "-a", str(small / "cache"), str(bigger)], check=True)
    assert capture(bigger) == (0, "")
    assert digests(bigger) == digests(whole)
    del before["manifest.json"]
    assert before.items() <= digests(whole).items()


def test_a_limit_on_file_sizes(
    capture: Callable[..., tuple[int, str]], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    shutil.copytree(whole, out)
    for path in [*(out / "index").iterdir()][1:]:
        path.unlink()
    limit = next((out / "shards").iterdir()).stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, said = capture(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    stopped_cleanly(code, said, out, "File too large")
    assert "ulimit -f" in said
    assert capture(out) == (0, "")
    assert digests(out) == digests(whole)


def test_a_lost_mount(capture: Callable[..., tuple[int, str]], whole: Path, tmp_path: Path) -> None:
    real, seen = tmp_path / "real", tmp_path / "seen"
    real.mkdir()
    mount(seen, "--bind", str(real))
    out = seen / "cache"
    code, said = capture(out, 1, lambda: unmount(seen))
    assert code == 1
    assert len(said.splitlines()) == 1
    assert str(out) in said
    assert "bring the disk or the mount back" in said
    assert 0 < committed(real / "cache") < SHARDS
    mount(seen, "--bind", str(real))
    try:
        assert capture(out) == (0, "")
        assert digests(out) == digests(whole)
    finally:
        unmount(seen)


def test_a_failing_disk(
    capture: Callable[..., tuple[int, str]], whole: Path, tmp_path: Path
) -> None:
    """What was committed had been brought to the disk: it is there after the device has failed."""
    point = tmp_path / "disk"
    out = point / "cache"
    with ext4(point, 48 << 20) as fail:
        code, said = capture(out, 2, fail)
        assert code == 1
        assert len(said.splitlines()) == 1
        assert str(out) in said
        assert "Input/output error" in said
    mount(point, "-o", "loop", str(point.with_suffix(".img")))
    try:
        kept = {k: v for k, v in digests(out).items() if k.endswith(".parquet")}
        assert 2 <= len(kept) < SHARDS
        assert kept.items() <= digests(whole).items()
        assert capture(out) == (0, "")
        assert digests(out) == digests(whole)
    finally:
        unmount(point)


def test_a_disk_mounted_read_only(
    capture: Callable[..., tuple[int, str]], whole: Path, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "disk", 2 * disk_bytes(whole)) as point:
        out = point / "cache"
        subprocess.run(["cp", "-a", str(whole), str(out)], check=True)
        min((out / "index").glob("*.parquet")).unlink()
        mount(point, "-o", "remount,ro")
        code, said = capture(out)
        assert code == 2
        assert f"--out {out}: cannot be written" in said
        mount(point, "-o", "remount,rw")
        assert capture(out) == (0, "")
        assert digests(out) == digests(whole)
