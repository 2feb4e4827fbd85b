"""Several drafts in one pass over the data."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from runs import ARCHS, CONFIG, OPTIONS, assert_same_weights, config_of, records
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache import loop
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.train import train_draft, train_drafts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("several") / "cache")


@pytest.fixture(scope="module")
def alone(cache: Path) -> Path:
    """Each draft trained by itself."""
    for arch in ARCHS:
        out = cache.parent / "alone" / arch
        train_draft(cache, arch, out, draft_config=config_of(arch), **OPTIONS)
    return cache.parent / "alone"


def assert_equal(one: Path, two: Path) -> None:
    for arch in ARCHS:
        assert_same_weights(one / arch, two / arch)
        assert (one / arch / "training.json").read_bytes() == (
            two / arch / "training.json"
        ).read_bytes()
        a, b = records(one / arch), records(two / arch)
        assert [r for r in a if r["event"] == "step"] == [r for r in b if r["event"] == "step"]
        for x, y in zip(a, b, strict=True):
            assert x.keys() == y.keys()
            assert x["tau"] == pytest.approx(y["tau"], abs=1e-6)


def test_each_comes_out_as_if_trained_alone(cache: Path, alone: Path, tmp_path: Path) -> None:
    results = train_drafts(cache, ARCHS, tmp_path, draft_config=CONFIG, **OPTIONS)
    assert [(r.arch, r.out) for r in results] == [(arch, tmp_path / arch) for arch in ARCHS]
    assert_equal(tmp_path, alone)
    again = train_drafts(cache, ARCHS, tmp_path, draft_config=CONFIG, **OPTIONS, resume=True)
    assert all(r.already_finished for r in again)
    assert [r.after for r in again] == [r.after for r in results]


def test_each_row_is_read_once_and_of_it_what_the_drafts_need(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where the system hands the bytes over."""
    read = 0
    streams: list[BatchStream] = []
    preadv, enter = os.preadv, BatchStream.__enter__

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal read
        size = preadv(fd, buffers, offset)
        read += size
        return size

    def entering(stream: BatchStream) -> BatchStream:
        streams.append(stream)
        return enter(stream)

    rows: list[int] = []
    real = loop.step_random

    def noting(seed: int, step: int, batch: Batch) -> RowRandom:
        rows.extend(batch["sample"].tolist())
        return real(seed, step, batch)

    archs = ["msd", "dspark", "dflash"]
    config = {"dspark.target_layer_ids": [1], "dflash.target_layer_ids": [1, 3]}
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        patch.setattr(BatchStream, "__enter__", entering)
        patch.setattr(loop, "step_random", noting)
        train_drafts(cache, archs, tmp_path, draft_config=config, **OPTIONS)
    opened = open_cache(cache)
    fields = ["input_ids", "attention_mask", "loss_mask", "image_mask", "inputs_embeds"]
    fields += ["last_hidden_state", "hidden_states.1", "hidden_states.3"]
    token = sum(opened.field(name).token_bytes for name in fields)
    before, training, after = streams
    assert len(rows) == OPTIONS["steps"] * OPTIONS["batch_size"] * len(archs)
    assert training.bytes_read * len(archs) == int(opened.lengths[rows].sum()) * token
    _, eval_rows = split_rows(ok_rows(opened), OPTIONS["eval_fraction"])
    evaluated = int(opened.lengths[list(eval_rows)].sum()) * token
    assert before.bytes_read == after.bytes_read == evaluated
    assert read == training.bytes_read + 2 * evaluated


def test_a_killed_pass_goes_on_with_each_from_where_it_was(
    cache: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.step_random

    def stop(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == 8:
            raise RuntimeError("killed")
        return real(seed, step, batch)

    def killed(archs: Sequence[str], **options: object) -> None:
        config = {k: v for k, v in CONFIG.items() if k.split(".")[0] in archs}
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            patch.setattr(loop, "step_random", stop)
            train_drafts(cache, archs, tmp_path, draft_config=config, **(OPTIONS | options))

    killed(["msd"], save_every=3)  # at step 6
    killed(["dspark"])  # at step 5
    killed(["eagle3"], save_every=9)  # before the first state
    train_drafts(cache, ARCHS, tmp_path, draft_config=CONFIG, **OPTIONS, resume=True)
    assert_equal(tmp_path, alone)


def test_one_that_is_finished_is_left_alone(cache: Path, alone: Path, tmp_path: Path) -> None:
    train_draft(cache, "msd", tmp_path / "msd", **OPTIONS)
    before = (tmp_path / "msd" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"dspark holds no training"):
        train_drafts(cache, ["msd", "dspark"], tmp_path, **OPTIONS, resume=True)
    assert (tmp_path / "msd" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("archs", "options", "message"),
    [
        (["msd", "msd"], {}, "name each draft once"),
        ([], {}, "name each draft once"),
        (["msd", "eagle"], {"init_from": "x"}, "--init-from starts one draft"),
        (["msd"], {"draft_config": {"dspark.block_size": 3}}, "dspark is not among the drafts"),
        (["msd", "dspark"], {"draft_config": {"block_size": 3}}, "block_size"),
        (["msd", "nonsense"], {}, "choose from"),
    ],
)
def test_bad_input_writes_nothing(
    cache: Path, tmp_path: Path, archs: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train_drafts(cache, archs, tmp_path / "out", **OPTIONS, **options)
    assert not (tmp_path / "out").exists()
