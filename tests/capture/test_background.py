"""What lies between the target and the disk is bounded, and no failure there is lost."""

import math
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.capture.background import BackgroundWriter, OpenShard
from dspark.capture.batch import FINITE, packed_batch
from dspark.capture.host_copies import HostCopies
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.shard_writer import WrittenRow
from dspark.schemas.digest import field_digest
from dspark.schemas.errors import StoppedError
from dspark.schemas.index import OK, IndexRow
from dspark.schemas.paths import CachePaths

LENGTH = 5


class Shard:
    """Rows without a target behind them."""

    number = 0
    samples = range(100)
    plan = SimpleNamespace(
        manifest=SimpleNamespace(
            identity_hash="0" * 16,
            target=SimpleNamespace(image_token_id=None),
            field=lambda name: None,
        )
    )

    def index_row(self, row: EncodedRow, *, finite: bool) -> IndexRow:
        return IndexRow(row.sample, row.sample, "", OK, "", len(row), 0, row.loss_tokens)


class SlowFile:
    """Writes nothing, and only when it is let."""

    def __init__(self) -> None:
        self.may_write = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.rows: list[int] = []
        self.closed = self.committed = False

    def write_row(self, row: int, tensors: dict[str, torch.Tensor]) -> WrittenRow:
        assert self.may_write.acquire(timeout=30)
        if self.failure is not None:
            raise self.failure
        self.rows.append(row)
        return WrittenRow((1,), 10)

    def commit(self) -> None:
        self.committed = True

    def close(self) -> None:
        self.closed = True


def encoded(sample: int, length: int = LENGTH) -> EncodedRow:
    ones = torch.ones(length, dtype=torch.bool)
    return EncodedRow.of(sample, f"row-{sample}", ones.long(), ones, ~ones)


def batch(*samples: int) -> tuple[BatchInputs, dict[str, torch.Tensor]]:
    ids = torch.ones(len(samples), LENGTH, dtype=torch.long)
    tokens = torch.arange(ids.numel())
    packed = {"position_ids": tokens[None], FINITE: tokens >= 0}
    return BatchInputs([encoded(s) for s in samples], {"input_ids": ids}), packed


@pytest.fixture
def paths(tmp_path: Path) -> CachePaths:
    (tmp_path / "index").mkdir()
    return CachePaths(tmp_path, 1)


@pytest.fixture
def file() -> Iterator[SlowFile]:
    file = SlowFile()
    yield file
    file.may_write.release(1000)


def opened(background: BackgroundWriter, file: Any) -> OpenShard:
    shard: Any = Shard()
    return background.open(shard, file)


def test_two_batches_wait_to_be_written_and_the_third_call_waits(
    paths: CachePaths, file: SlowFile
) -> None:
    steps: list[Step] = []
    with BackgroundWriter(paths, steps.append) as background:
        shard = opened(background, file)
        for sample in (0, 1):
            background.write(shard, *batch(sample))
        third = threading.Thread(target=background.write, args=(shard, *batch(2)))
        third.start()
        third.join(timeout=0.3)
        assert third.is_alive() and not steps
        file.may_write.release(2)
        third.join(timeout=30)
        assert not third.is_alive() and steps[0] == Step(1, LENGTH, 10)
        assert 0 in file.rows  # the other thread may still be about to write row 1
        file.may_write.release(1)
        background.finish()
    assert sorted(file.rows) == [0, 1, 2]
    assert sum(step.samples for step in steps) == 3
    assert file.closed and not file.committed


def test_a_failed_write_is_raised_by_what_comes_next_and_nothing_is_committed(
    paths: CachePaths, file: SlowFile
) -> None:
    file.failure = OSError(28, "No space left on device")
    with (
        pytest.raises(OSError, match="No space left"),
        BackgroundWriter(paths, lambda step: None) as background,
    ):
        shard = opened(background, file)
        background.write(shard, *batch(0))
        file.may_write.release(1)
        background.commit(shard)
        background.finish()
    assert file.closed and not file.committed
    assert not list(paths.root.rglob("*.parquet"))


def test_a_commit_waits_for_the_rows_of_its_shard(paths: CachePaths, file: SlowFile) -> None:
    with BackgroundWriter(paths, lambda step: None) as background:
        shard = opened(background, file)
        shard.index |= {s: IndexRow(s, s, "", "skipped", "why") for s in range(1, 100)}
        background.write(shard, *batch(0))
        background.commit(shard)
        background.check()
        assert not file.committed
        file.may_write.release(1)
        background.finish()
    assert file.committed and file.closed
    assert paths.index(0).is_file()


@pytest.mark.parametrize(
    ("error", "committed"), [(RuntimeError("of the next shard"), True), (StoppedError(15), False)]
)
def test_another_error_does_not_undo_a_written_shard_but_a_signal_does_not_wait(
    paths: CachePaths, file: SlowFile, error: BaseException, committed: bool
) -> None:
    with pytest.raises(type(error)), BackgroundWriter(paths, lambda step: None) as background:
        shard = opened(background, file)
        shard.index |= {s: IndexRow(s, s, "", "skipped", "why") for s in range(4, 100)}
        background.write(shard, *batch(0, 1))
        background.write(shard, *batch(2, 3))  # waits behind the other one
        background.commit(shard)
        threading.Timer(0.2, file.may_write.release, (4,)).start()
        raise error
    assert file.closed
    assert (file.committed, len(file.rows)) == (committed, 4 if committed else 2)


def test_nothing_is_copied_on_a_cpu() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    copied = HostCopies(2).start(tensors).wait()
    assert all(copied[k] is v for k, v in tensors.items())


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 10**6))
def test_an_encoded_row_gives_its_mask_and_digest_back(mask: list[bool], seed: int) -> None:
    ids = torch.randint(0, 10**6, (len(mask),), generator=torch.Generator().manual_seed(seed))
    spoken = torch.tensor(mask)
    row = EncodedRow.of(0, "", ids, spoken, ~spoken)
    assert torch.equal(row.loss_mask(), spoken.to(torch.uint8))
    assert (row.loss_tokens, row.image_tokens, len(row)) == (
        sum(mask),
        len(mask) - sum(mask),
        len(mask),
    )
    assert row.ids_digest == field_digest(ids.to(torch.int32).numpy().tobytes())


def test_an_encoded_row_is_small_whatever_its_length() -> None:
    ids = torch.arange(4096)
    spoken = (ids // 128) % 2 == 1  # 16 turns
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rows = [EncodedRow.of(i, f"row-{i:08}", ids, spoken, ~spoken) for i in range(1000)]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / len(rows) < 700, grown
    assert sys.getsizeof(rows[0].loss_borders) < 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_that_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    """At any place of a vector, beside any others."""
    vectors = torch.randn(60, 20).to(dtype)
    for i, bad in enumerate((math.nan, math.inf, -math.inf)):
        for place in range(20):
            vectors[20 * i + place, place] = bad
            vectors[20 * i + place, (place + 7) % 20] = (1.0, -math.inf, math.inf)[i]
    vectors = torch.cat([vectors, torch.finfo(dtype).max * torch.ones(3, 20).to(dtype)])
    features: Any = SimpleNamespace(
        stored={"last_hidden_state": vectors, "inputs_embeds": torch.zeros_like(vectors)},
        last_hidden=vectors,
        position_ids=None,
    )
    manifest: Any = SimpleNamespace(logits="head")
    finite = packed_batch(features, manifest)[FINITE]
    assert finite.tolist() == [all(map(math.isfinite, v)) for v in vectors.tolist()]
    assert finite.tolist() == [False] * 60 + [True] * 3
