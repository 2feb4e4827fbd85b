"""``--dtype fp8`` and ``--embeds pictures``: what they store, and that nothing else changes."""

import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversation_data import mixed_rows, write_rows
from damage import rewrite
from safetensors.torch import load_file
from test_resume import SHARDS, command, digests, stop_after

import dspark
from dspark.capture.batch import FINITE, packed_batch
from dspark.capture.estimate.run import estimate_capture
from dspark.capture.options import CaptureOptions
from dspark.capture.recapture import prepare_recapture
from dspark.capture.settings import CaptureSettings
from dspark.capture.stored import TargetSizes, stored
from dspark.capture.targets.features import Features
from dspark.reports import inspection as report_inspection
from dspark.reports import plan as report_plan
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.float8 import RELATIVE_ERROR, SMALLEST, to_float8
from dspark.schemas.manifest import Manifest, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths
from dspark.train_from_cache.decode import decode
from dspark.train_from_cache.inspection import inspect_cache
from dspark.train_from_cache.target_head import TargetHead
from dspark.verify.compare import compare_rows
from dspark.verify.run import verify_cache

ROWS = 16
FORMS = {
    "exact": {"dtype": "fp32"},
    "full": {"dtype": "bf16"},
    "fp8": {"dtype": "fp8"},
    "pictures": {"embeds": "pictures"},
    "both": {"dtype": "fp8", "embeds": "pictures"},
}


@pytest.fixture(scope="module")
def inputs(
    tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    data = write_rows(tmp_path_factory.mktemp("smaller") / "d.parquet", mixed_rows(ROWS))
    return {"target": str(tiny_target("qwen2_5_vl")), "data": str(data)}


@pytest.fixture(scope="module")
def caches(
    inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dspark.Cache]:
    """The same capture in each form."""
    folder = tmp_path_factory.mktemp("forms")
    found = {}
    for name, form in FORMS.items():
        dspark.capture(2, **inputs, out=str(folder / name), logits="head", **form)
        found[name] = dspark.open_cache(folder / name, check_digests=True)
    return found


def decoded_row(cache: dspark.Cache, sample: int) -> dict[str, torch.Tensor]:
    embeddings = TargetHead.load(cache.root).embeddings
    return decode(cache[sample], cache.manifest.all_fields, embeddings)


def vectors(manifest: Manifest) -> list[str]:
    return [f.name for f in manifest.fields if f.name.startswith(("inputs_embeds", "hidden_st"))]


def test_every_number_in_8_bits_is_as_near_as_is_stated(caches: dict[str, dspark.Cache]) -> None:
    """Of the target's own number, not of one that was rounded before."""
    names = vectors(caches["exact"].manifest)
    assert len(names) == 4
    for sample in range(ROWS):
        exact, full = caches["exact"][sample], caches["full"][sample]
        found = decoded_row(caches["fp8"], sample)
        assert found.keys() == exact.keys()
        for name in names:
            want, got = exact[name].double(), found[name].double()
            floor = SMALLEST * want.abs().amax(-1, keepdim=True)
            allowed = RELATIVE_ERROR * torch.maximum(want.abs(), floor)
            assert ((got - want).abs() <= allowed).all(), (sample, name)
            assert not torch.equal(got, want)
        for name in exact.keys() - {*names}:
            assert torch.equal(found[name], full[name]), (sample, name)


@pytest.mark.parametrize("form", ["pictures", "both"])
def test_text_comes_back_from_the_embedding_table(
    caches: dict[str, dspark.Cache], form: str
) -> None:
    full, eight = caches["full"], caches["fp8"]
    for sample in range(ROWS):
        stored, found = caches[form][sample], decoded_row(caches[form], sample)
        text = stored["image_mask"] == 0
        assert not stored["inputs_embeds"].float()[text].any()
        want = full[sample] if form == "pictures" else decoded_row(eight, sample)
        assert torch.equal(found["inputs_embeds"][text], full[sample]["inputs_embeds"][text])
        assert torch.equal(found["inputs_embeds"][~text], want["inputs_embeds"][~text])
        assert found.keys() == want.keys()
        assert all(torch.equal(found[k], want[k]) for k in want.keys() - {"inputs_embeds"})


def test_any_safetensors_reader_reads_it(caches: dict[str, dspark.Cache]) -> None:
    cache = caches["both"]
    m = cache.manifest
    stored = load_file(CachePaths(cache.root, m.num_shards).shard(0))
    assert stored.keys() == {f.name for f in m.fields}
    assert stored["hidden_states.0"].dtype == torch.float8_e4m3fn
    assert stored["hidden_states.0.scale"].shape == (m.rows_per_shard, m.max_length)
    for sample in m.rows_of(0):
        for name, x in cache[sample].items():
            whole = stored[name][sample].double()
            axis = m.field(name).token_axis  # type: ignore[union-attr]
            length = x.shape[axis]
            assert torch.equal(whole.narrow(axis, 0, length), x.double()), name
            assert not whole.narrow(axis, length, m.max_length - length).any(), name


def test_text_is_not_written(inputs: dict[str, str], tmp_path: Path) -> None:
    """Of rows long enough that their embeddings fill blocks of the disk."""
    rows = mixed_rows(1)
    rows[0]["messages"][0]["content"][-1]["text"] = "word " * 80
    data = write_rows(tmp_path / "d.parquet", rows)
    options = {"target": inputs["target"], "data": str(data), "layers": "none"}
    used, real = {}, {}
    for embeds in ("all", "pictures"):
        out = tmp_path / embeds
        dspark.capture(1, **options, logits="head", dtype="fp32", embeds=embeds, out=str(out))
        used[embeds] = CachePaths(out, 1).shard(0).stat().st_blocks * 512
        real[embeds] = inspect_cache(str(out))["real_bytes"]
    m = read_manifest(tmp_path / "all")
    field = m.field("inputs_embeds")
    assert field is not None and m.counts.image_tokens == 0
    left_out = m.counts.tokens * field.token_bytes
    assert left_out > 10 * 4096
    assert real["all"] - real["pictures"] == left_out
    assert abs(used["all"] - used["pictures"] - left_out) <= 2 * 4096


def test_drafts_train_alike_without_stored_text(
    caches: dict[str, dspark.Cache], tmp_path: Path
) -> None:
    options = {"steps": 3, "batch_size": 3, "device": "cpu", "progress": False}
    ends = {}
    for form in ("full", "pictures"):
        dspark.train_draft(caches[form].root, "msd", tmp_path / form, **options)
        ends[form] = load_file(tmp_path / form / "model.safetensors")
    assert all(torch.equal(x, ends["pictures"][name]) for name, x in ends["full"].items())


def test_every_draft_trains_from_the_smallest_form(
    caches: dict[str, dspark.Cache], tmp_path: Path
) -> None:
    from dspark.train_from_cache.drafts import ARCHITECTURES
    from dspark.train_from_cache.train import train_drafts

    small = {"dspark.num_anchors": 4, "dflash.num_anchors": 4, "eagle3.ttt_steps": 2}
    results = train_drafts(
        caches["both"].root, ARCHITECTURES, tmp_path, steps=1, batch_size=4, device="cpu",
        eval_fraction=0.3, draft_config=small, progress=False,
    )  # fmt: skip
    assert len(results) == 7 and all(r.after["tau"] >= 1 for r in results)


def test_stopped_and_continued(inputs: dict[str, str], tmp_path: Path) -> None:
    target = Path(inputs["target"])
    data = write_rows(tmp_path / "d.parquet", mixed_rows(60))
    form = {"dtype": "fp8", "embeds": "pictures"}
    options = {"target": str(target), "data": str(data), "batch_tokens": 300, **form}
    dspark.capture(SHARDS, **options, out=str(tmp_path / "whole"))
    out = tmp_path / "stopped"
    flags = [text for name, value in form.items() for text in (f"--{name}", value)]
    process = subprocess.Popen(command(target, data, out, *flags), stderr=subprocess.DEVNULL)
    stop_after(process, out, 2, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    dspark.capture(SHARDS, **options, out=str(out))
    assert digests(out) == digests(tmp_path / "whole")


def test_layers_are_added_in_the_same_form(
    caches: dict[str, dspark.Cache], inputs: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "c"
    form = FORMS["both"]
    dspark.capture(2, **inputs, out=str(out), logits="head", layers="1", **form)
    dspark.capture(out=str(out), extend=True, layers="0,1,2")
    at_once, added = caches["both"], dspark.open_cache(out)
    assert {f.name for f in added.manifest.all_fields} == {
        f.name for f in at_once.manifest.all_fields
    }
    for sample in range(ROWS):
        one, other = at_once[sample], added[sample]
        assert all(
            torch.equal(x.view(torch.uint8), other[k].view(torch.uint8)) for k, x in one.items()
        )


def test_the_plan_knows_what_is_stored(
    caches: dict[str, dspark.Cache], inputs: dict[str, str], tmp_path: Path
) -> None:
    given = {**inputs, "out": str(tmp_path / "c"), "logits": "head"}
    estimate = estimate_capture(CaptureOptions(2, **given), exact=True)
    found = {a.options: a for a in estimate.alternatives}
    for option, form in (("--dtype fp8", "fp8"), ("--embeds pictures", "pictures")):
        assert found[option].stored.fields == caches[form].manifest.fields
        assert not found[option].refusal
        real = inspect_cache(str(caches[form].root))["real_bytes"]
        assert found[option].sizes.real_bytes == real < estimate.sizes.real_bytes
    both = estimate_capture(CaptureOptions(2, **given, **FORMS["both"]), exact=True)
    assert "logits head, inputs_embeds of pictures alone; enough for" in report_plan.plan(both)
    shown = report_inspection.inspection(inspect_cache(str(caches["both"].root)))
    assert "inputs_embeds is stored where image_mask is 1; elsewhere target/ has it" in shown
    assert both.manifest.fields == caches["both"].manifest.fields
    assert both.sizes.real_bytes == inspect_cache(str(caches["both"].root))["real_bytes"]


def test_it_is_verified(
    inputs: dict[str, str], caches: dict[str, dspark.Cache], tmp_path: Path
) -> None:
    """Against the target, and byte by byte."""
    cache = caches["both"]
    lengths = {sample: int(cache.lengths[sample]) for sample in range(ROWS)}
    again = prepare_recapture(cache.root, cache.manifest, target=inputs["target"])
    assert compare_rows(cache.root, cache.manifest, lengths, again.rows(lengths)).equal
    assert not verify_cache(cache.root, deep=True).faults

    out = tmp_path / "c"
    dspark.capture(1, **inputs, out=str(out), limit=4, logits="head", **FORMS["both"])
    one = dspark.open_cache(out)[1]
    nan = one["hidden_states.0"].view(torch.uint8).numpy().copy()
    nan[2, 3] = 0xFF
    rewrite(out, 1, "hidden_states.0", nan, digest=True)
    scales = one["hidden_states.1.scale"].numpy().copy()
    scales[2] = 0
    rewrite(out, 1, "hidden_states.1.scale", scales, digest=True)
    text = one["inputs_embeds"].view(torch.uint8).numpy().copy()
    text[0] = np.uint8(1)
    rewrite(out, 1, "inputs_embeds", text, digest=False)
    problems = {f.field: f.problem for f in verify_cache(out, deep=True).faults}
    assert problems == {
        "hidden_states.0": "a number is not finite",
        "hidden_states.1.scale": "a scale is not positive",
        "inputs_embeds": "its bytes are not those that were captured",
    }


def test_a_manifest_that_says_otherwise_is_refused(
    caches: dict[str, dspark.Cache], tmp_path: Path
) -> None:
    """Of where a field is stored, and of which fields are in 8 bits."""
    m = caches["both"].manifest
    first, *others = m.fields
    for wrong in (
        replace(first, where="loss_mask"),
        replace(first, where=None),
        replace(first, where=3),  # type: ignore[arg-type]
        replace(first, dtype="BF16"),
    ):
        write_manifest(tmp_path, replace(m, fields=(wrong, *others)))
        with pytest.raises(IncompatibleCacheError, match="damaged"):
            read_manifest(tmp_path)
    write_manifest(tmp_path, m)
    assert read_manifest(tmp_path) == m


def test_logits_are_stored_where_they_cost_no_more_than_the_rest() -> None:
    sizes = TargetSizes(num_layers=4, hidden_size=100, vocab_size=450, position_rows=1)
    found = {
        dtype: stored(CaptureSettings.check(CaptureOptions(2, dtype=dtype)), sizes, 32)  # type: ignore[arg-type]
        for dtype in ("bf16", "fp8")
    }
    assert {dtype: kept.logits for dtype, kept in found.items()} == {"bf16": "full", "fp8": "head"}
    rest = sum(f.token_bytes for f in found["fp8"].fields if f.dtype in ("F8_E4M3", "BF16"))
    assert rest == 600 < 2 * sizes.vocab_size


def test_a_token_that_does_not_fit_is_not_finite(caches: dict[str, dspark.Cache]) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = 3e38
    stored, scale = to_float8(rows)
    features = Features(
        stored={"inputs_embeds": stored, "inputs_embeds.scale": scale},
        position_ids=torch.zeros(1, 3, dtype=torch.int32),
        last_hidden=rows,
        logits=None,
        embeds_source="",
        side_inputs=[],
        streams={},
    )
    assert packed_batch(features, caches["fp8"].manifest)[FINITE].tolist() == [True, False, True]
