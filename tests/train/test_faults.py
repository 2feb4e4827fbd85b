"""Whatever goes wrong while rows are read ahead stops the training; no step gets another's rows."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import OPTIONS, assert_same_weights, steps
from safetensors import safe_open
from synthetic_cache import write_cache

from dspark.train_from_cache import loop, stream
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import open_cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts.msd import MSDDraft
from dspark.train_from_cache.part import Part
from dspark.train_from_cache.train import train_draft

BROKEN = 7  # the batch in which it goes wrong


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("faults") / "cache")


@pytest.fixture(scope="module")
def whole(cache: Path) -> Path:
    train_draft(cache, "msd", cache.parent / "whole", **OPTIONS)
    return cache.parent / "whole"


FAULTS = {
    "an error of the disk": OSError(5, "Input/output error"),
    "no memory": MemoryError(),
    "a fault of the program": KeyError("x"),
    "a thread that is told to leave": SystemExit(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_read_stops_before_its_step(
    cache: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    error = FAULTS[fault]
    seen: list[list[int]] = []
    real, random_of = Part.read_row, loop.step_random

    def failing(self: Part, sample: int, field: Any, out: memoryview) -> int:
        # Reads run ahead, so the row counts only once the steps before have begun.
        if len(seen) and sample in broken:
            raise error
        return real(self, sample, field, out)

    def noting(seed: int, step: int, batch: Batch) -> RowRandom:
        seen.append(batch["sample"].tolist())
        return random_of(seed, step, batch)

    order = rows_of_steps(cache)
    before = {row for rows in order[: BROKEN + 1] for row in rows}
    broken = [row for rows in order[BROKEN + 1 :] for row in rows if row not in before][:1]
    last = next(i for i, rows in enumerate(order) if broken[0] in rows)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Part, "read_row", failing)
        patch.setattr(loop, "step_random", noting)
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS)
    assert seen == order[:last]
    assert [r["step"] for r in steps(tmp_path / "out")] == list(range(1, last + 1))
    with safe_open(tmp_path / "out/training_state/state.safetensors", framework="pt") as file:
        assert int(file.metadata()["step"]) == last // 5 * 5
    assert not [t for t in threading.enumerate() if t.name.startswith("dspark-read")]
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS, resume=True)
    assert_same_weights(tmp_path / "out", whole)


def test_readers_that_cannot_start_stop_the_training(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = stream.ThreadPoolExecutor.submit
    calls = 0

    def refusing(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise RuntimeError("can't start new thread")
        return submit(self, *args)

    monkeypatch.setattr(stream.ThreadPoolExecutor, "submit", refusing)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_slow_and_unordered_reads_change_nothing(
    cache: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that began with a batch not yet read, or already overwritten, would differ."""
    real, real_forward = Part.read_row, MSDDraft.forward
    chance = random.Random(0)
    opened = open_cache(cache)

    def slow(self: Part, sample: int, field: Any, out: memoryview) -> int:
        if chance.random() < 0.2:
            time.sleep(0.004 * chance.random())
        return real(self, sample, field, out)

    def checked(self: MSDDraft, batch: Batch, *rest: Any) -> Any:
        terms = real_forward(self, batch, *rest)
        time.sleep(0.002)
        for i, sample in enumerate(batch["sample"].tolist()):
            for name in ("last_hidden_state", "inputs_embeds", "loss_mask"):
                stored = opened[sample][name]
                assert torch.equal(batch[name][i, : len(stored)], stored), (sample, name)
                assert not batch[name][i, len(stored) :].any()
        return terms

    monkeypatch.setattr(Part, "read_row", slow)
    monkeypatch.setattr(MSDDraft, "forward", checked)
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS)
    assert_same_weights(tmp_path / "out", whole)


def test_a_stream_that_ends_early_is_an_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stream.BatchStream.__iter__

    def short(self: stream.BatchStream) -> Any:
        for i, batch in enumerate(real(self)):
            if i == BROKEN:
                return
            yield batch

    monkeypatch.setattr(stream.BatchStream, "__iter__", short)
    with pytest.raises(ValueError, match="shorter"):
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def rows_of_steps(cache: Path) -> list[list[int]]:
    """The rows of each step, as an undisturbed training takes them."""
    seen: list[list[int]] = []
    real = loop.step_random

    def noting(seed: int, step: int, batch: Batch) -> RowRandom:
        seen.append(batch["sample"].tolist())
        return real(seed, step, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step_random", noting)
        train_draft(cache, "msd", cache.parent / f"order{time.monotonic_ns()}", **OPTIONS)
    return seen
