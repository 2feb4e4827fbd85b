"""An extension that is killed leaves the cache as it was, and continues to the same bytes."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from conversation_data import mixed_rows, write_rows
from torchrun import SHARDS, kill_all, run, start, wait_until

import dspark


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def test_killed_and_continued(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(90))
    out = tmp_path / "cache"
    dspark.capture(
        SHARDS,
        target=str(tiny_target("qwen2_5_vl")),
        data=str(data),
        out=str(out),
        batch_tokens=300,
        layers="none",
    )
    old = digests(out)
    whole = shutil.copytree(out, tmp_path / "whole")
    assert dspark.capture(extend=True, drafts="dspark", out=str(whole)).shards_written == SHARDS

    command = ["capture", "--extend", "--drafts", "dspark", "--out", str(out)]
    job = start(2, *command)
    wait_until(
        lambda: list(out.glob("index/*.plus1.parquet")) and list(out.glob("shards/*.tmp")), job
    )
    assert job.poll() is None, job.communicate()
    kill_all(job)
    left = len(list(out.glob("index/*.plus1.parquet")))
    assert 1 <= left < SHARDS
    now = digests(out)
    assert {name for name, digest in old.items() if now[name] != digest} == {"manifest.json"}
    assert "hidden_states.1" not in dspark.open_cache(out)[0]
    found = dspark.verify_cache(out, deep=True)
    assert (found.exit_code, found.extensions_to_finish) == (0, [1])
    assert f"not finished, {left} of {SHARDS} shards are committed" in found.notes[0]

    code, said, err = run(2, *command)
    assert code == 0, err
    assert said.count(f"({SHARDS - left} written now") == 1
    assert digests(out) == digests(whole)
