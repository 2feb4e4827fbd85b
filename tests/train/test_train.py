"""Training a draft from a cache alone."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from synthetic_cache import write_cache
from torch import Tensor

from dspark.schemas.errors import IncompatibleCacheError, InputError, StoppedError
from dspark.schemas.paths import CachePaths, head_path, target_dir
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache import checkpoint, loop, train
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.teacher import Teacher
from dspark.train_from_cache.train import TrainResult, train_draft

SMALL: dict[str, dict[str, Any]] = {
    "msd": {},
    "dspark": {"num_hidden_layers": "1", "block_size": "4", "markov_rank": "8"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("train") / "cache")


def fit(cache: Path, out: Path, arch: str = "msd", **options: Any) -> TrainResult:
    merged = {
        "steps": 12, "batch_size": 4, "save_every": 5, "log_every": 1, "device": "cpu",
        "progress": False, "eval_fraction": 0.2, "draft_config": SMALL[arch],
    } | options  # fmt: skip
    return train_draft(cache, arch, out, **merged)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("arch", ["msd", "dspark"])
def test_trains_from_the_cache_alone(cache: Path, tmp_path: Path, arch: str) -> None:
    assert [p.name for p in target_dir(cache).iterdir()] == ["head.safetensors"]
    random_state = torch.get_rng_state()
    result = fit(cache, tmp_path / "out", arch, steps=40, lr=3e-3)
    assert torch.equal(torch.get_rng_state(), random_state)

    assert (result.arch, result.steps, result.already_finished) == (arch, 40, False)
    assert result.train_rows + result.eval_rows == 35
    lines = records(tmp_path / "out")
    assert [(r["event"], r.get("when"), r["step"]) for r in lines] == [
        ("eval", "before", 0),
        *(("step", None, step) for step in range(1, 41)),
        ("eval", "after", 40),
    ]
    losses = [r["loss"] for r in lines if r["event"] == "step"]
    assert sum(losses[-5:]) < sum(losses[:5])
    for metrics, line in ((result.before, lines[0]), (result.after, lines[-1])):
        assert metrics is not None
        assert metrics.items() <= line.items()
        assert 1 <= metrics["tau"] <= 1 + len(metrics["acceptance"])
        assert metrics["rows"] == result.eval_rows

    out = tmp_path / "out"
    loaded = draft_class(arch).from_pretrained(out)
    weights = load_file(out / "model.safetensors")
    assert weights.items() and all(
        torch.equal(loaded.state_dict()[name], tensor) for name, tensor in weights.items()
    )
    for name in ("config.json", "model.safetensors", "training_state/state.safetensors"):
        assert (out / name).stat().st_mode & 0o777 == 0o644


def test_curves_go_to_tensorboard(cache: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(cache, tmp_path / "out", steps=3)
    curves = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    curves.Reload()
    assert [e.step for e in curves.Scalars("train/loss")] == [1, 2, 3]
    assert [e.step for e in curves.Scalars("eval/tau")] == [0, 3]


def test_equal_seeds_give_equal_drafts_on_the_same_held_out_rows(
    cache: Path, tmp_path: Path
) -> None:
    a, b = fit(cache, tmp_path / "a", "dspark"), fit(cache, tmp_path / "b", "dspark")
    c = fit(cache, tmp_path / "c", "dspark", seed=1)
    one, two, three = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert a.after == b.after
    assert any(not torch.equal(one[name], three[name]) for name in one)
    assert a.before is not None and c.before is not None
    assert a.before["anchors"] == c.before["anchors"]


def test_epochs_count_passes_over_the_training_rows(cache: Path, tmp_path: Path) -> None:
    result = fit(cache, tmp_path / "out", steps=None, epochs=0.5)
    assert result.steps == -(-result.train_rows // 8)


def test_no_rows_held_out(cache: Path, tmp_path: Path) -> None:
    result = fit(cache, tmp_path / "out", steps=2, eval_fraction=0.0)
    assert (result.train_rows, result.eval_rows) == (35, 0)
    assert result.after["tau"] is None


class Recorder:
    """What a draft was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: list[Batch] = []
        self.hidden: list[Tensor] = []
        recorder = self

        class Recorded(draft_class("msd")):  # type: ignore[misc]
            def forward(
                self, batch: Batch, teacher: Teacher, random: RowRandom
            ) -> dict[str, LossTerm]:
                recorder.inputs.append({k: v.clone() for k, v in batch.items()})
                recorder.hidden.append(teacher.hidden.clone())
                return super().forward(batch, teacher, random)

            def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
                recorder.inputs.append({k: v.clone() for k, v in batch.items()})
                return super().predict(batch, anchors)

        monkeypatch.setattr(train, "draft_class", lambda arch: Recorded)


@pytest.mark.parametrize("control", [False, True])
def test_the_control_hides_the_targets_states_from_the_draft_only(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    recorder = Recorder(monkeypatch)
    fit(cache, tmp_path / "out", steps=3, zero_hidden_states=control)
    assert len(recorder.inputs) > 6
    for batch in recorder.inputs:
        assert batch["last_hidden_state"].any() != control
        assert batch["inputs_embeds"].any() and batch["loss_mask"].any()
    assert all(hidden.any() for hidden in recorder.hidden)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_the_state_after_the_update_under_way(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    fit(cache, tmp_path / "whole", "dspark")
    real = loop.step_random

    def interrupting(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == 6:
            os.kill(os.getpid(), how)
        return real(seed, step, batch)

    handler = signal.getsignal(how)
    with (
        monkeypatch.context() as patch,
        pytest.raises(StoppedError, match="after step 7") as stopped,
    ):
        patch.setattr(loop, "step_random", interrupting)
        fit(cache, tmp_path / "out", "dspark")
    assert signal.getsignal(how) is handler
    assert stopped.value.exit_code == 128 + how
    assert not (tmp_path / "out" / "model.safetensors").exists()
    fit(cache, tmp_path / "out", "dspark", resume=True)
    assert [r["step"] for r in records(tmp_path / "out")] == [0, *range(1, 13), 12]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rows(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache")
    cache = open_cache(root)
    bad = int(split_rows(ok_rows(cache), 0.2)[0][9])
    shard, row = divmod(bad, cache.manifest.rows_per_shard)
    layout = ShardLayout(cache.manifest.fields, cache.manifest.rows_per_shard)
    field = cache.field("last_hidden_state")
    with open(CachePaths(root, cache.manifest.num_shards).shard(shard), "r+b") as file:
        for offset, size in layout.row_extents(field, row, int(cache.lengths[bad])):
            os.pwrite(file.fileno(), b"\xff" * size, offset)
    with pytest.raises(InputError, match=rf"stopped at step \d+: .* nan .*rows .*\b{bad}\b"):
        fit(root, tmp_path / "out", steps=30)
    state = load_file(tmp_path / "out" / "training_state" / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_a_training_is_never_overwritten(cache: Path, tmp_path: Path) -> None:
    fit(cache, tmp_path / "out", steps=2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(InputError, match="already holds a training.*--resume.*--out"):
        fit(cache, tmp_path / "out", steps=2)
    again = fit(cache, tmp_path / "out", steps=2, resume=True)
    assert again.already_finished and again.before and again.after["tau"] >= 1
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_resume_needs_the_same_settings(cache: Path, tmp_path: Path) -> None:
    fit(cache, tmp_path / "out", "dspark", steps=2)
    other = {**SMALL["dspark"], "block_size": "5"}
    with pytest.raises(InputError) as caught:
        fit(
            cache, tmp_path / "out", "dspark", steps=3, lr=0.5, seed=4, resume=True,
            draft_config=other,
        )  # fmt: skip
    for part in ("--steps: 2 there, 3 now", "--lr", "--seed", "draft_config.block_size: 4 there"):
        assert part in str(caught.value)
    assert "--batch-size" not in str(caught.value)
    elsewhere = write_cache(tmp_path / "other", seed=9)
    with pytest.raises(InputError, match=r"cache\.seed: 0 there, 9 now"):
        fit(elsewhere, tmp_path / "out", "dspark", steps=2, resume=True)
    with pytest.raises(InputError, match="--arch: 'dspark' there, 'msd' now"):
        fit(cache, tmp_path / "out", "msd", steps=2, resume=True)


def test_a_moved_cache_and_other_habits_do_not_stop_a_resume(cache: Path, tmp_path: Path) -> None:
    fit(cache, tmp_path / "out", steps=2)
    moved = write_cache(tmp_path / "moved")
    assert fit(
        moved, tmp_path / "out", steps=2, resume=True, save_every=1, log_every=2
    ).already_finished


def test_resume_without_a_training_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no training.*leave --resume out"):
        fit(cache, tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"batch_size": -1}, "--batch-size -1"),
        ({"batch_size": 2**45}, "--batch-size .* do not fit into memory"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": 1e38}, r"--lr 1e\+38: must be at most 1"),
        ({"lr": "3e-4"}, "--lr '3e-4': must be a number"),
        ({"steps": 2.5}, "--steps 2.5: must be a whole number"),
        ({"save_every": None}, "--save-every None: must be a whole number"),
        ({"seed": None}, "--seed None: must be a whole number"),
        ({"eval_fraction": "a"}, "--eval-fraction 'a': must be a number"),
        ({"warmup": 1.0}, "--warmup 1.0"),
        ({"epochs": 2.0}, "--steps and --epochs"),
        ({"eval_fraction": 1.0}, "--eval-fraction"),
        ({"device": "tpu"}, "--device tpu"),
        ({"draft_config": {"colour": "red"}}, "colour"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    cache: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit(cache, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_numbers_of_numpy_are_taken(cache: Path, tmp_path: Path) -> None:
    numbers = {"steps": np.int64(2), "seed": np.uint8(1), "lr": np.float32(1e-3)}
    fit(cache, tmp_path / "numpy", **numbers)
    fit(cache, tmp_path / "plain", **{k: v.item() for k, v in numbers.items()})
    for name in ("model.safetensors", "training.json"):
        one, other = ((tmp_path / out / name).read_bytes() for out in ("numpy", "plain"))
        assert one == other


def test_a_damaged_head_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache")
    path = head_path(root)
    good = load_file(path)
    save_file({name: x.flatten() for name, x in good.items()}, path)
    with pytest.raises(IncompatibleCacheError, match="head is missing or damaged"):
        fit(root, tmp_path / "out", "dspark")
    save_file({**good, "lm_head.bias": torch.zeros(3)}, path)
    with pytest.raises(IncompatibleCacheError, match=r"a bias of shape \(3,\)"):
        fit(root, tmp_path / "out")
    path.unlink()
    with pytest.raises(IncompatibleCacheError, match="head is missing or damaged"):
        fit(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(InputError, match="--out .*: a file lies where this folder would"):
            fit(cache, out)


def test_one_training_at_a_time_works_in_a_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = train.evaluate_together

    def meanwhile(*args: Any, **options: Any) -> list[dict[str, Any]]:
        for resume in (False, True):
            with pytest.raises(InputError, match="another process is training here"):
                fit(cache, out, resume=resume)
        return real(*args, **options)

    monkeypatch.setattr(train, "evaluate_together", meanwhile)
    fit(cache, out)
    monkeypatch.undo()
    assert fit(cache, out, resume=True).already_finished


@pytest.mark.parametrize("text", ["{", "3", "{}", '{"options": 3}'])
def test_resume_with_damaged_settings_is_refused(cache: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "training.json").write_text(text)
    with pytest.raises(InputError, match=r"training\.json: not readable"):
        fit(cache, tmp_path, resume=True)


@pytest.mark.parametrize("place", ["training_state/state.safetensors.tmp", "model.tmp"])
def test_a_full_disk_is_an_error_of_the_system(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    if place == "model.tmp":
        monkeypatch.setattr(draft_class("msd"), "save_pretrained", full)
    else:
        monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        fit(cache, tmp_path / "out")
    assert error.value.errno == errno.ENOSPC
    assert str(error.value.filename).endswith(place)


@pytest.mark.parametrize("text", ["{}", "3", "[]", '{"step": 1', "\0"])
def test_the_log_ends_before_a_line_that_is_no_record(
    cache: Path, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "out"
    fit(cache, out)
    log = out / "metrics.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:4], text, *lines[5:]]))
    assert fit(cache, out, resume=True).steps == 12
    assert [r["when"] for r in records(out) if r["event"] == "eval"] == ["before", "after"]


def test_rows_without_two_supervised_tokens_are_refused(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", lengths=[1] * 40)
    with pytest.raises(InputError, match="has two supervised tokens"):
        fit(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_resume_writes_a_lost_draft_again(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = fit(cache, out)
    model = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    again = fit(cache, out, resume=True)
    assert not again.already_finished and again.after == first.after
    assert (out / "model.safetensors").read_bytes() == model
    assert fit(cache, out, resume=True).already_finished


def test_a_missing_field_is_named_before_anything_is_written(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", layers=(0, 1))
    with pytest.raises(IncompatibleCacheError, match=r"needs hidden_states\.2"):
        fit(root, tmp_path / "out", "dspark")
    assert not (tmp_path / "out").exists()


def test_processes_that_are_alone_are_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="--fsdp .* this is one"):
        fit(cache, tmp_path / "out", fsdp=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE is 2, but .* start them with torchrun"):
        fit(cache, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_is_a_few_plain_lines_where_there_is_no_terminal(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(cache, tmp_path / "out", steps=60, progress=True)
    lines = capfd.readouterr().err.splitlines()
    steps = [line for line in lines if "step " in line]
    assert 15 <= len(steps) <= 25
    assert "step 60/60, loss " in steps[-1] and "tau 1." in steps[-1]
