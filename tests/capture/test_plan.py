"""``dspark plan`` says before a capture what the capture then takes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import assistant, mixed_rows, row, text, user, write_rows
from safetensors.torch import load_file, save_file
from tiny_targets import VOCABULARY, chat_template, tokenizer

import dspark
from dspark.capture.estimate.room import Fit
from dspark.capture.estimate.run import CaptureEstimate, estimate_capture
from dspark.capture.options import CaptureOptions
from dspark.reports import plan as report_plan
from dspark.reports.text import size
from dspark.schemas.errors import InputError

SHARDS = 3


@pytest.fixture
def options(tiny_target: Callable[[str], Path], tmp_path: Path) -> CaptureOptions:
    """Of a capture of pictures and texts, some of which cannot be captured."""
    rows = mixed_rows(17)
    rows[3] = row(3, [user(text("Hi"))])
    rows[11] = row(11, [user(text("x" * 600)), assistant("y")])
    data = write_rows(tmp_path / "d.parquet", rows)
    return CaptureOptions(
        SHARDS,
        target=str(tiny_target("qwen2_5_vl")),
        data=str(data),
        out=str(tmp_path / "cache"),
        max_skipped=0.5,
    )


def captured(options: CaptureOptions) -> Any:
    return dspark.capture(**{k: v for k, v in vars(options).items() if k != "_"})


def file_bytes(root: Path) -> int:
    return sum(p.stat().st_size for p in (root / "shards").iterdir())


def test_what_is_planned_is_what_is_written(options: CaptureOptions) -> None:
    planned = estimate_capture(options, exact=True)
    root = Path(options.out)
    assert not root.exists()
    done = captured(options)
    assert planned.rows.counts == done.manifest.counts
    assert planned.rows.skipped == done.skipped
    assert planned.rows.relative_error == 0
    assert planned.sizes.real_bytes == done.bytes_written
    assert planned.sizes.file_bytes == file_bytes(root)
    on_disk = sum(512 * p.stat().st_blocks for p in (root / "shards").iterdir())
    if on_disk < planned.sizes.file_bytes:  # a file system that keeps holes
        assert planned.sizes.disk_bytes == pytest.approx(on_disk, rel=0.1)
    head = (root / "target" / "head.safetensors").stat().st_size
    assert 0 < head - planned.head_bytes < 1000


def test_what_zarr_takes_is_less_than_is_planned(options: CaptureOptions) -> None:
    options = replace(options, format="zarr")
    planned = estimate_capture(options, exact=True)
    assert f"on disk: at most about {size(planned.sizes.disk_bytes)}, and less by what zarr" in (
        report_plan.plan(planned)
    )
    assert f"it fits: at most about {size(planned.room.disk_bytes)} needed" in (
        report_plan.plan(planned)
    )
    full = replace(planned, room=replace(planned.room, free_bytes=planned.room.disk_bytes - 1))
    assert "it does NOT fit: " in report_plan.plan(full)
    captured(options)
    shards = Path(options.out) / "shards"
    written = sum(p.stat().st_size for p in shards.rglob("*") if p.is_file())
    assert 0 < written < planned.sizes.disk_bytes


def test_each_alternative_is_what_such_a_capture_writes(
    options: CaptureOptions, tmp_path: Path
) -> None:
    options = replace(options, layers="-1", logits="topk:7", dtype="fp32")
    planned = estimate_capture(options, exact=True)
    changes = [a.options.split() for a in planned.alternatives]
    assert {name for name, _ in changes} == {
        *("--dtype", "--embeds", "--logits", "--layers", "--drafts")
    }
    for number, (name, value) in enumerate(changes):
        other = replace(options, out=str(tmp_path / str(number)), **{name[2:]: value})
        if name == "--drafts":
            other = replace(other, layers="auto")
        done = captured(other)
        said = planned.alternatives[number]
        assert said.refusal == ""
        assert said.stored.fields == done.manifest.fields
        assert said.sizes.real_bytes == done.bytes_written, name
        assert said.sizes.file_bytes == file_bytes(Path(other.out)), name


def test_which_choices_are_offered(options: CaptureOptions) -> None:
    """What stores the same as now is left out; drafts that read the same layers are together."""

    def offered(**change: Any) -> list[str]:
        estimate = estimate_capture(replace(options, **change))
        return [a.options for a in estimate.alternatives]

    assert offered() == [
        "--dtype fp32",
        "--dtype fp8",
        "--embeds pictures",
        "--logits topk:64",
        "--logits full",
        "--layers none",
        "--drafts eagle,medusa,msd,vispec",
    ]
    assert offered(layers="0", dtype="fp32", logits="head") == [
        "--dtype bf16",
        "--dtype fp16",
        "--dtype fp8",
        "--embeds pictures",
        "--logits topk:64",
        "--logits full",
        "--layers none",
        "--layers auto",
        "--drafts eagle,medusa,msd,vispec",
        "--drafts dflash,dspark,eagle3",
    ]


def test_drafts_choose_layers(options: CaptureOptions, tmp_path: Path) -> None:
    none = captured(replace(options, drafts="msd,medusa", out=str(tmp_path / "none")))
    assert none.manifest.layers == ()
    some = estimate_capture(replace(options, drafts="msd,eagle3"))
    assert some.manifest.layers == (0, 1, 2)
    assert "eagle3" in some.served
    assert "eagle3" not in estimate_capture(replace(options, layers="none")).served
    with pytest.raises(InputError, match="--drafts eagle9: no draft 'eagle9'; choose from .*msd"):
        captured(replace(options, drafts="eagle9"))
    with pytest.raises(InputError, match="give one of them"):
        captured(replace(options, drafts="msd", layers="1"))


def test_a_sample_says_how_far_off_it_may_be(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """Lengths are skewed, every fifth row cannot be captured."""
    rng = random.Random(0)
    rows = [
        row(i, [user(text("a" * min(300, int(rng.lognormvariate(3, 1))))), assistant("Yes.")])
        for i in range(600)
    ]
    rows[::5] = [row(i, [user(text("Hi"))]) for i in range(0, 600, 5)]
    data = write_rows(tmp_path / "d.parquet", rows)
    options = CaptureOptions(
        2, target=str(tiny_target("llava")), data=str(data), out=str(tmp_path / "c")
    )
    sampled, exact = estimate_capture(options), estimate_capture(options, exact=True)
    assert (sampled.rows.read, exact.rows.read) == (256, 600)
    assert exact.rows.counts.skipped == {"no assistant turn": 120}
    error = sampled.rows.relative_error
    assert 0.02 < error < 0.2
    truth = exact.rows.counts.tokens
    assert abs(sampled.rows.counts.tokens - truth) <= error * sampled.rows.counts.tokens
    assert sampled.sizes.real_bytes == sampled.rows.counts.tokens * sampled.sizes.token_bytes
    assert sampled.sizes.disk_bytes == pytest.approx(exact.sizes.disk_bytes, rel=error)
    assert sampled.rows.counts.skipped["no assistant turn"] == pytest.approx(120, rel=0.3)

    printed = report_plan.plan(sampled)
    assert f"estimated from 256 of 600 rows: tokens and sizes are ± {100 * error:.1f} %" in printed
    assert "more than --max-skipped 0.1 allows" in printed
    assert "counted in all 600 rows" in report_plan.plan(exact)


def test_choices_that_the_target_refuses(
    options: CaptureOptions, tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """Features beyond fp16's range; a soft-cap that no stored head gives back."""
    import shutil

    from transformers import Gemma2Config, Gemma2ForCausalLM

    loud = tmp_path / "loud"
    shutil.copytree(tiny_target("qwen2_5_vl"), loud)
    weights = load_file(loud / "model.safetensors")
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name][tokenizer()("W")["input_ids"]] = 1e6
    save_file(weights, loud / "model.safetensors", {"format": "pt"})
    found = estimate_capture(replace(options, target=str(loud), dtype="fp32"))
    assert refusals(found).keys() == {"--dtype fp16"}
    assert "not all finite numbers of type float16" in refusals(found)["--dtype fp16"]

    capped = tmp_path / "capped"
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=0.3,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(capped)
    texts = tokenizer()
    texts.chat_template = chat_template("")
    texts.save_pretrained(capped)
    found = estimate_capture(replace(options, target=str(capped), logits="full"))
    assert refusals(found).keys() == {"--logits head"}
    assert "caps or scales them" in refusals(found)["--logits head"]
    assert "--logits head would be refused: " in report_plan.plan(found)


def refusals(estimate: CaptureEstimate) -> dict[str, str]:
    return {a.options: a.refusal for a in estimate.alternatives if a.refusal}


def test_the_verdict(options: CaptureOptions) -> None:
    found = estimate_capture(options, exact=True)

    def verdict(free: float, *, keeps_holes: bool) -> str:
        room = replace(found.room, free_bytes=int(free), keeps_holes=keeps_holes)
        return report_plan.plan(replace(found, room=room)).splitlines()[-2]

    room = found.room
    assert "which fits as well" in verdict(room.file_bytes, keeps_holes=False)
    assert "it fits: " in verdict(room.disk_bytes, keeps_holes=True)
    assert "a copy that fills them takes" in verdict(room.disk_bytes, keeps_holes=True)
    assert "does NOT fit: that file system keeps no" in verdict(room.disk_bytes, keeps_holes=False)
    assert "it does NOT fit: " in verdict(room.disk_bytes - 1, keeps_holes=True)
    unsure = replace(found, room=replace(room, free_bytes=room.disk_bytes, relative_error=0.05))
    assert "± 5.0 % needed; --exact says it" in report_plan.plan(unsure)


def test_what_is_there_already_needs_no_room(options: CaptureOptions) -> None:
    whole = estimate_capture(options, exact=True)
    assert whole.room.shards == SHARDS
    assert whole.room.disk_bytes == whole.sizes.disk_bytes + whole.head_bytes
    assert whole.room.file_bytes == whole.sizes.file_bytes + whole.head_bytes
    assert whole.room.fit == Fit.FITS
    captured(replace(options, only="1"))
    rest = estimate_capture(options, exact=True).room
    assert rest.shards == 2
    assert rest.file_bytes == 2 * whole.manifest.shard_bytes
    assert rest.disk_bytes == pytest.approx(whole.sizes.disk_bytes * 11 / 17, abs=1)
    assert estimate_capture(replace(options, only="2")).room.shards == 1
    assert estimate_capture(replace(options, overwrite=True)).room.shards == SHARDS
    captured(options)
    done = estimate_capture(options)
    assert done.room.shards == 0
    assert "nothing is left to capture" in report_plan.plan(done)


def test_an_out_that_a_capture_would_refuse(options: CaptureOptions) -> None:
    captured(options)
    other = estimate_capture(replace(options, dtype="fp32"))
    assert "other settings (dtype: 'bf16' there, 'fp32' now" in other.obstacle
    assert "the capture would be refused: " in report_plan.plan(other)
    assert estimate_capture(replace(options, dtype="fp32", overwrite=True)).obstacle == ""


def test_speed_is_measured_without_writing(options: CaptureOptions) -> None:
    found = estimate_capture(replace(options, batch_tokens=300), exact=True, measure=True)
    speed = found.speed
    assert speed is not None
    assert not Path(options.out).exists()
    assert speed.rows == 17
    assert 1 < speed.batches <= 8
    assert 0 < speed.tokens <= found.rows.counts.tokens
    document = report_plan.document(found)["speed"]
    alone = speed.seconds(17, found.rows.counts.tokens)
    assert document["tokens_per_second"] == found.rows.counts.tokens / alone
    assert document["capture_seconds"]["1"] == alone
    assert document["capture_seconds"]["8"] == document["capture_seconds"]["64"]
    assert document["capture_seconds"]["8"] == pytest.approx(alone / 3)
    assert "1 of 3" in report_plan.plan(found)


def test_more_workers_than_one_are_refused(
    options: CaptureOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        estimate_capture(options)
