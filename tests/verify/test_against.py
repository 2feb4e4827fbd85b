"""Rows captured once more are what is stored, and whatever is not is named."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversation_data import assistant, mixed_rows, row, text, user, write_rows
from damage import rewrite
from safetensors.torch import load_file, save_file
from synthetic_cache import write_cache
from tiny_targets import tokenizer

import dspark
from dspark.capture.recapture import prepare_recapture
from dspark.cli import main
from dspark.schemas.errors import InputError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest, write_manifest
from dspark.schemas.paths import CachePaths
from dspark.verify.compare import Comparison, compare_rows, random_rows

Captured = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def captured(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Captured:
    """Cache, target, data: two shards of several batches, one of them with a non-finite row."""
    folder = tmp_path_factory.mktemp("against")
    target = shutil.copytree(tiny_target("qwen2_5_vl"), folder / "target")
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name][tokenizer()("Q")["input_ids"]] = 1e6
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    rows = mixed_rows(16)
    rows[3] = row(3, [user(text("Hello Q")), assistant("Yes, it is.")])
    data = write_rows(folder / "d.parquet", rows)
    out = folder / "cache"
    dspark.capture(
        2,
        target=str(target),
        data=str(data),
        out=str(out),
        dtype="fp16",
        logits="topk:4",
        batch_tokens=600,
    )
    return out, target, data


def compare(cache: Path, target: Path, *, rows: int = 99, data: str | None = None) -> Comparison:
    found = dspark.verify_cache(cache)
    assert found.manifest is not None
    drawn = random_rows(found, rows, seed=0)
    again = prepare_recapture(cache, found.manifest, target=str(target), data=data)
    return compare_rows(
        cache,
        found.manifest,
        drawn,
        again.rows(drawn),
        again.target_differences,
        again.other_differences,
    )


def test_all_rows_are_equal_bit_for_bit(captured: Captured) -> None:
    """Although row 3, which is not finite and so not stored, was in a batch with others."""
    cache, target, _ = captured
    manifest = dspark.open_cache(cache).manifest
    assert manifest.counts.skipped == {"non-finite features": 1}
    compared = compare(cache, target)
    assert compared.samples == [s for s in range(16) if s != 3]
    assert [f.name for f in compared.fields] == [f.name for f in manifest.fields]
    assert all(f.rows == 15 and f.largest == f.token_error == 0 for f in compared.fields)
    assert compared.equal
    assert not compared.differs
    assert compared.target_differences == compared.other_differences == []


def test_the_rows_are_a_draw(captured: Captured) -> None:
    found = dspark.verify_cache(captured[0])
    draws = [tuple(random_rows(found, 5, seed)) for seed in range(4)]
    assert all(len(d) == 5 and list(d) == sorted(d) for d in draws)
    assert len(set(draws)) > 1
    assert draws[0] == tuple(random_rows(found, 5, 0))


def test_what_was_changed_behind_its_digest_is_named(captured: Captured, tmp_path: Path) -> None:
    cache = shutil.copytree(captured[0], tmp_path / "cache")
    numbers = {k: v.numpy().copy() for k, v in dspark.open_cache(cache)[5].items()}
    hidden = numbers["last_hidden_state"]
    hidden[4] += np.float16(0.25) * np.abs(hidden[4]).max()
    loss = numbers["loss_mask"]
    loss[:] = np.roll(loss, 1)
    rewrite(cache, 5, "last_hidden_state", hidden, digest=True)
    rewrite(cache, 5, "loss_mask", loss, digest=True)
    assert dspark.verify_cache(cache, deep=True).exit_code == 0
    compared = compare(cache, captured[1])
    by_name = {f.name: f for f in compared.fields}
    assert not by_name["last_hidden_state"].equal
    stored = torch.from_numpy(hidden[4]).float()
    expected = 0.2 * float(stored.abs().max())
    assert by_name["last_hidden_state"].largest == pytest.approx(expected, rel=0.3)
    assert by_name["inputs_embeds"].equal
    assert [(f.sample, f.field) for f in compared.faults] == [
        (5, "last_hidden_state"),
        (5, "loss_mask"),
    ]


def test_rounding_is_no_fault(captured: Captured, tmp_path: Path) -> None:
    cache = shutil.copytree(captured[0], tmp_path / "cache")
    hidden = dspark.open_cache(cache)[5]["hidden_states.1"].numpy().copy()
    rewrite(cache, 5, "hidden_states.1", hidden * np.float16(1.01), digest=True)
    compared = compare(cache, captured[1])
    assert not compared.equal
    assert not compared.differs
    (changed,) = [f for f in compared.fields if not f.equal]
    assert changed.token_error == pytest.approx(0.01, rel=0.1)
    assert changed.sample == 5


def test_bits_that_differ_where_nothing_else_does_are_told(
    captured: Captured, tmp_path: Path, run_dspark: Callable[..., tuple[int, str, str]]
) -> None:
    cache = shutil.copytree(captured[0], tmp_path / "cache")
    hidden = dspark.open_cache(cache)[5]["hidden_states.1"].numpy().copy()
    rewrite(cache, 5, "hidden_states.1", hidden * np.float16(1.01), digest=True)
    code, out, _ = run_dspark("verify", "--cache", cache, "--against", captured[1], "--rows", 99)
    assert code == 0
    assert "equal but for rounding" in out
    assert "bits differ although kind of device and library versions are those of the" in out
    assert "--deep tells whether the bytes have changed" in out
    assert "largest error of a token's vector" in out


def test_what_cannot_be_captured_again_is_one_sentence(
    captured: Captured, tmp_path: Path, run_dspark: Callable[..., tuple[int, str, str]]
) -> None:
    cache, target, _ = captured
    code, _, err = run_dspark("verify", "--cache", cache, "--against", "/nowhere")
    assert (code, err.splitlines()[-1]) == (2, "dspark: --against /nowhere: no such folder")
    assert run_dspark("verify", "--cache", cache, "--against", "")[0] == 2
    for key in ("data", "batch_tokens", "fake_image", "target.attention"):
        other = write_cache(tmp_path / key)
        before = read_manifest(other)
        known = read_manifest(cache).identity
        after = replace(before, identity={k: v for k, v in known.items() if k != key})
        paths = CachePaths(other, before.num_shards)
        for shard in range(before.num_shards):
            table, facts = read_index(paths, before, shard)
            rows = [IndexRow(**{**r, "digests": tuple(r["digests"])}) for r in table.to_pylist()]
            write_index(paths.index(shard), rows, {**facts, "identity": after.identity_hash})
        write_manifest(other, after)
        code, out, err = run_dspark("verify", "--cache", other, "--against", target)
        assert code == 2
        assert f"its manifest's identity has no {key!r}" in err


def test_another_target_is_a_fault_and_named_first(
    captured: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache, target, _ = captured
    other = shutil.copytree(target, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights = {k: v * 1.5 if k.endswith("o_proj.weight") else v for k, v in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    args = ["verify", "--cache", str(cache), "--against", str(other), "--rows", "4"]
    monkeypatch.setattr(sys, "argv", ["dspark", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("not the captured target: target: '")
    assert "field last_hidden_state: a token's vector is off by" in "\n".join(lines)
    assert "4 rows captured again" in lines[-1]
    assert lines[-1].endswith("not what this target gives")


def test_without_the_captured_data_it_cannot_be_told(captured: Captured, tmp_path: Path) -> None:
    cache, target, _ = captured
    with pytest.raises(InputError, match="nowhere.parquet: no such file"):
        compare(cache, target, data="nowhere.parquet")
    other = write_rows(tmp_path / "other.parquet", mixed_rows(16, seed=1))
    with pytest.raises(InputError, match="not the conversations that were captured"):
        compare(cache, target, data=str(other))
