"""``capture --extend``: fields added to a finished cache, which stays what it was."""

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversation_data import assistant, mixed_rows, row, text, user, write_rows
from flipped_bytes import xor_byte
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_targets import VOCABULARY, chat_template, tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM

import dspark
from dspark.capture.estimate.run import estimate_capture
from dspark.capture.options import CaptureOptions
from dspark.capture.recapture import prepare_recapture
from dspark.cli import main
from dspark.reports import plan as report_plan
from dspark.schemas.claims import Claim
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify.compare import compare_rows, random_rows
from dspark.verify.repair import Repair, repair_cache

SHARDS = 4
Inputs = tuple[Path, Path]


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def old_files(root: Path) -> dict[str, str]:
    """Of the cache before it was extended, but the manifest."""
    return {
        name: digest
        for name, digest in digests(root).items()
        if ".plus" not in name and name != "manifest.json"
    }


@pytest.fixture(scope="module")
def inputs(tiny_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A target that gives no finite number for a "Q", and rows of all kinds, some not captured."""
    folder = tmp_path_factory.mktemp("extend")
    target = shutil.copytree(tiny_target("qwen2_5_vl"), folder / "target")
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name][tokenizer()("Q")["input_ids"]] = 1e6
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    rows = mixed_rows(38)
    rows[3] = row(3, [user(text("Hello Q")), assistant("Yes, it is.")])
    rows[11] = row(11, [user(text("Hi"))])
    return target, write_rows(folder / "d.parquet", rows)


def options(inputs: Inputs, out: Path, **more: object) -> dict:
    target, data = inputs
    given = {"target": str(target), "data": str(data), "out": str(out)}
    return given | {"dtype": "fp16", "batch_tokens": 300, "logits": "head"} | more


@pytest.fixture(scope="module")
def captured(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("captured") / "cache"
    dspark.capture(SHARDS, **options(inputs, out, drafts="msd"))
    return out


@pytest.fixture(scope="module")
def extended(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command that a draft's refusal names."""
    cache = shutil.copytree(captured, tmp_path_factory.mktemp("extended") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", shlex.split(refusal(cache)))
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return cache


@pytest.fixture
def cache(captured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(captured, tmp_path / "cache")


@pytest.fixture
def more(extended: Path, tmp_path: Path) -> Path:
    return shutil.copytree(extended, tmp_path / "cache")


def refusal(cache: Path, arch: str = "dspark", **config: str) -> str:
    """The command that a training from the cache is refused with."""
    with pytest.raises(IncompatibleCacheError, match=f"draft '{arch}' needs hidden_states") as no:
        train(cache, cache.parent / "draft", arch, **config)
    return str(no.value).rpartition(": ")[2]


def train(cache: Path, out: Path, arch: str = "dspark", **config: str) -> dict[str, torch.Tensor]:
    small = {"num_hidden_layers": "1", "block_size": "4", "markov_rank": "8"} | config
    dspark.train_draft(
        cache, arch, out, steps=6, batch_size=4, device="cpu", draft_config=small, progress=False
    )
    return load_file(out / "model.safetensors")


def test_a_draft_names_the_command_and_then_trains_as_from_one_capture(
    inputs: Inputs, captured: Path, extended: Path, tmp_path: Path
) -> None:
    assert refusal(captured) == f"dspark capture --extend --drafts dspark --out {captured}"
    assert refusal(captured, target_layer_ids="[-1,2]") == (
        f"dspark capture --extend --layers=-1,2 --out {captured}"
    )
    assert old_files(extended) == old_files(captured)
    both = tmp_path / "both"
    dspark.capture(SHARDS, **options(inputs, both, drafts="msd,dspark"))
    one, other = dspark.open_cache(extended, check_digests=True), dspark.open_cache(both)
    names = [f.name for f in other.manifest.fields]
    assert sorted(names) == sorted(f.name for f in one.manifest.all_fields)
    assert one.manifest.counts == other.manifest.counts
    assert one.manifest.counts.skipped == {"no assistant turn": 1, "non-finite features": 1}
    for sample in range(len(one)):
        a, b = one[sample], other[sample]
        assert all(torch.equal(a[name], b[name]) for name in names)
    a, b = train(extended, tmp_path / "a"), train(both, tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_there_is_not_captured_again(extended: Path, more: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in more.rglob("*")}
    for asked in ({"drafts": "dspark"}, {"drafts": "msd"}, {"logits": "head"}, {"layers": "1"}):
        report = dspark.capture(extend=True, out=str(more), **asked)
        assert (report.added, report.shards_written) == ((), 0)
    assert {p: p.stat().st_mtime_ns for p in more.rglob("*")} == before


def test_a_capture_of_other_fields_names_this_way(inputs: Inputs, captured: Path) -> None:
    with pytest.raises(InputError, match="continue it, --extend to add fields to it, choose"):
        dspark.capture(SHARDS, **options(inputs, captured, drafts="dspark"))
    with pytest.raises(InputError, match="continue it, choose another"):
        dspark.capture(SHARDS, **options(inputs, captured, drafts="dspark", dtype="bf16"))


def test_logits_that_the_head_does_not_give_are_no_obstacle(tmp_path: Path) -> None:
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
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")
    texts = tokenizer()
    texts.chat_template = chat_template("")
    texts.save_pretrained(tmp_path / "capped")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(9)[::3])
    out = tmp_path / "cache"
    dspark.capture(
        2,
        target=str(tmp_path / "capped"),
        data=str(data),
        out=str(out),
        logits="full",
        layers="none",
    )
    report = dspark.capture(extend=True, layers="1", logits="topk:4", out=str(out))
    assert report.added is not None and "hidden_states.1" in report.added
    assert dspark.verify_cache(out, deep=True).exit_code == 0


def test_any_safetensors_reader_opens_the_new_files(extended: Path) -> None:
    manifest = read_manifest(extended)
    paths = CachePaths(extended, SHARDS, 1)
    assert paths.shard(2).name == "shard-00002-of-00004.plus1.safetensors"
    assert paths.index(2).name == "shard-00002-of-00004.plus1.parquet"
    cache = dspark.open_cache(extended)
    with safe_open(paths.shard(2), "pt") as file:
        assert sorted(file.keys()) == sorted(f.name for f in manifest.extensions[0].fields)
        for place, sample in enumerate(manifest.rows_of(2)):
            for name in file.keys():  # noqa: SIM118 (no dict)
                stored = cache[sample][name]
                assert torch.equal(file.get_tensor(name)[place, : len(stored)], stored)
                assert not file.get_tensor(name)[place, len(stored) :].any()


def test_a_second_extension_adds_the_logits(inputs: Inputs, more: Path, tmp_path: Path) -> None:
    before = old_files(more) | {n: d for n, d in digests(more).items() if "plus1" in n}
    assert dspark.open_cache(more).manifest.best_logits == "head"
    report = dspark.capture(extend=True, out=str(more), logits="topk:4", drafts="dspark")
    assert report.added == ("logits_topk.values", "logits_topk.indices", "logits_topk.logsumexp")
    after = digests(more)
    assert before.items() <= after.items()
    assert sum(".plus2." in name for name in after) == 2 * SHARDS
    both = tmp_path / "both"
    dspark.capture(SHARDS, **options(inputs, both, logits="topk:4", layers="none"))
    cache, other = dspark.open_cache(more), dspark.open_cache(both)
    assert cache.manifest.best_logits == "topk:4"
    for sample in range(len(cache)):
        assert all(torch.equal(cache[sample][k], v) for k, v in other[sample].items())
    with pytest.raises(InputError, match="the cache holds topk:4"):
        dspark.capture(extend=True, out=str(more), logits="topk:8")
    assert dspark.capture(extend=True, out=str(more), logits="full").added == ("logits",)
    assert dspark.open_cache(more).manifest.best_logits == "full"
    found = dspark.verify_cache(more, deep=True)
    assert (found.faults, found.notes, found.exit_code) == ((), (), 0)


def test_rows_captured_again_are_compared_in_all_files(inputs: Inputs, more: Path) -> None:
    dspark.capture(extend=True, out=str(more), logits="topk:4")
    manifest = read_manifest(more)
    drawn = random_rows(dspark.verify_cache(more), 99, 0)
    again = prepare_recapture(more, manifest, target=str(inputs[0]))
    compared = compare_rows(more, manifest, drawn, again.rows(drawn))
    assert [f.name for f in compared.fields] == [f.name for f in manifest.all_fields]
    assert all(f.rows == 36 and f.equal for f in compared.fields)


def test_jobs_share_shards_by_number(cache: Path, extended: Path) -> None:
    given = {"extend": True, "drafts": "dspark", "out": str(cache)}
    assert dspark.capture(**given, only="1,3").missing == (0, 2)
    with Claim(CachePaths(cache, SHARDS, 1).shard(2)):
        assert dspark.capture(**given).missing == (2,)
    assert dspark.capture(**given).shards_written == 1
    assert digests(cache) == digests(extended)


def test_an_unfinished_extension_is_finished_or_overwritten(cache: Path, extended: Path) -> None:
    dspark.capture(extend=True, layers="0", out=str(cache), only="1")
    with pytest.raises(InputError, match=r"layers: \[0\] there, \[0, 1, 2\] now") as refused:
        dspark.capture(extend=True, drafts="dspark", out=str(cache))
    assert f"'dspark capture --extend --layers 0 --out {cache}'" in str(refused.value)
    dspark.capture(extend=True, drafts="dspark", out=str(cache), overwrite=True)
    assert digests(cache) == digests(extended)
    again = dspark.capture(extend=True, drafts="dspark", out=str(cache), overwrite=True)
    assert again.added == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "fp32"}, "dtype: 'fp16' there, 'fp32' now"),
        ({"dtype": "bf16"}, "dtype: 'fp16' there, 'bf16' now"),
        ({"batch_tokens": 16384}, "batch_tokens: 300 there, 16384 now"),
        ({"max_length": 256}, "max_length: 512 there, 256 now"),
        ({"limit": 20}, "num_samples: 38 there, 20 now"),
        ({"shards": 3}, "shards: 4 there, 3 now"),
        ({"overlong": "truncate"}, "overlong: 'skip' there, 'truncate' now"),
        ({"mask_reasoning": True}, "mask_reasoning: False there, True now"),
        ({"attn_implementation": "eager"}, "target.attention: 'sdpa' there, 'eager' now"),
        ({"fake_image": "always"}, "fake_image: False there, True now"),
    ],
)
def test_other_options_are_refused_by_name(cache: Path, change: dict, words: str) -> None:
    before = digests(cache)
    with pytest.raises(InputError, match="was captured otherwise") as refused:
        dspark.capture(extend=True, drafts="dspark", out=str(cache), **change)
    assert words in str(refused.value)
    assert digests(cache) == before


def test_the_options_of_the_capture_may_be_repeated(
    inputs: Inputs, cache: Path, extended: Path
) -> None:
    given = options(inputs, cache, drafts="dspark")
    dspark.capture(SHARDS, **given, extend=True, max_length=512, limit=38, overlong="skip")
    assert digests(cache) == digests(extended)


def test_other_weights_and_other_data_are_refused(
    inputs: Inputs, cache: Path, tmp_path: Path
) -> None:
    target, _ = inputs
    copy = shutil.copytree(target, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    name = next(n for n in sorted(weights) if n.endswith("o_proj.weight"))
    save_file(weights | {name: weights[name] * 2}, copy / "model.safetensors", {"format": "pt"})
    before = digests(cache)
    for change, words in (
        ({"target": str(copy)}, "target: "),
        ({"data": str(write_rows(tmp_path / "o.parquet", mixed_rows(38, seed=1)))}, "data: "),
    ):
        with pytest.raises(InputError, match="was captured otherwise") as refused:
            dspark.capture(extend=True, drafts="dspark", out=str(cache), **change)
        assert words in str(refused.value)
    assert digests(cache) == before


def change_stored(cache: Path, sample: int, name: str, change: Callable) -> None:
    """Store other numbers with a digest of their own."""
    from damage import rewrite

    rewrite(
        cache, sample, name, change(dspark.open_cache(cache)[sample][name].numpy()), digest=True
    )


def test_other_tokens_and_other_numbers_are_found(cache: Path, tmp_path: Path) -> None:
    given = {"extend": True, "drafts": "dspark"}
    other = shutil.copytree(cache, tmp_path / "other")
    change_stored(other, 25, "input_ids", lambda ids: ids[::-1])
    with pytest.raises(InputError, match="row 25 is not the row that was captured"):
        dspark.capture(**given, out=str(other))
    assert not (other / "shards" / "shard-00002-of-00004.plus1.safetensors").exists()
    first = longest(cache, 1)
    change_stored(cache, first, "last_hidden_state", lambda x: x * 1.01)
    dspark.capture(**given, out=str(cache), only="1")
    change_stored(cache, longest(cache, 2), "last_hidden_state", lambda x: x * -1)
    with pytest.raises(InputError, match="is off by 2 of its length, 0.1 is allowed"):
        dspark.capture(**given, out=str(cache))


def longest(cache: Path, shard: int) -> int:
    """A dataset row of the shard's first batch."""
    opened = dspark.open_cache(cache)
    return max(opened.manifest.rows_of(shard), key=lambda i: opened.lengths[i])


def test_a_damaged_row_is_not_taken_for_another_target(cache: Path) -> None:
    manifest = read_manifest(cache)
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    field = manifest.field("last_hidden_state")
    assert field is not None
    sample = longest(cache, 1)
    offset, _ = layout.row_extents(field, sample % manifest.rows_per_shard, 1)[0]
    xor_byte(CachePaths(cache, SHARDS).shard(1), offset, 1)
    with pytest.raises(InputError, match=f"last_hidden_state of dataset row {sample} is damaged"):
        dspark.capture(extend=True, drafts="dspark", out=str(cache))
    xor_byte(CachePaths(cache, SHARDS).index(1), 40, 1)
    with pytest.raises(InputError, match="00001-of-00004.parquet: no sound sample index"):
        dspark.capture(extend=True, drafts="dspark", out=str(cache))
    assert not list(cache.rglob("*.tmp"))


def test_numbers_that_the_cache_cannot_hold_are_named(tmp_path: Path, inputs: Inputs) -> None:
    """A layer that is beyond fp16 in a row that is stored without it."""
    loud = shutil.copytree(inputs[0], tmp_path / "loud")
    weights = load_file(loud / "model.safetensors")
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name][tokenizer()("Z")["input_ids"]] = 65_500
        if "visual" not in name and name.endswith("layers.1.mlp.down_proj.weight"):
            weights[name] *= 200
    save_file(weights, loud / "model.safetensors", {"format": "pt"})
    rows = mixed_rows(6)
    rows[4] = row(4, [user(text("Hello Z")), assistant("Yes.")])
    data = write_rows(tmp_path / "d.parquet", rows)
    out = tmp_path / "cache"
    dspark.capture(2, **options((loud, data), out, layers="none"))
    with pytest.raises(InputError, match="row 4 is stored and has numbers beyond fp16 in a field"):
        dspark.capture(extend=True, layers="1", out=str(out))
    assert dspark.verify_cache(out, deep=True).exit_code == 0


def test_what_is_planned_is_what_is_written(cache: Path, extended: Path) -> None:
    before = digests(cache)
    asked = CaptureOptions(extend=True, drafts="dspark", out=str(cache))
    planned = estimate_capture(asked, measure=True)
    added = read_manifest(extended).parts[1]
    assert planned.manifest == replace(added, complete=False)
    assert planned.rows.counts == added.counts
    assert planned.sizes.token_bytes == sum(f.token_bytes for f in added.fields)
    assert planned.sizes.file_bytes == SHARDS * added.shard_bytes
    assert planned.sizes.real_bytes == added.counts.tokens * planned.sizes.token_bytes
    assert planned.room.shards == SHARDS
    assert planned.served == ("dflash", "dspark", "eagle", "eagle3", "medusa", "msd", "vispec")
    said = report_plan.plan(planned)
    assert "added to what is stored: layers 0,1,2 (by output), logits none; with those" in said
    assert report_plan.document(planned)["extends"]
    assert digests(cache) == before


def test_a_plan_that_adds_nothing_says_so(
    extended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "--extend", "--drafts", "dspark", "--out", str(extended)]
    said = f"{extended}: all that was asked for is there already, nothing to do\n"
    for more, printed in ([], lambda out: out == said), (["--json"], json.loads):
        monkeypatch.setattr(sys, "argv", ["dspark", *args, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        assert printed(capsys.readouterr().out)


def test_an_unfinished_extension_with_other_logits_is_told(cache: Path) -> None:
    dspark.capture(extend=True, layers="1", out=str(cache), only="0")
    with pytest.raises(InputError, match="logits: not given there, topk:3 now"):
        dspark.capture(extend=True, layers="1", logits="topk:3", out=str(cache))


def test_an_unfinished_capture_is_not_extended(cache: Path) -> None:
    CachePaths(cache, SHARDS).index(1).unlink()
    with pytest.raises(InputError, match="is not finished; this finishes it") as refused:
        dspark.capture(extend=True, drafts="dspark", out=str(cache))
    assert "dspark capture --shards 4" in str(refused.value)


Command = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a ``dspark …`` command here: exit code and stdout."""

    def command(words: list[str]) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().out

    return command


def test_damage_in_an_added_file_is_named_and_redone_alone(
    more: Path, extended: Path, command: Command
) -> None:
    assert dspark.verify_cache(more, deep=True).exit_code == 0
    paths, part = CachePaths(more, SHARDS, 1), read_manifest(more).parts[1]
    field = part.fields[1]
    offset, _ = ShardLayout(part.fields, part.rows_per_shard).row_extents(field, 4, 1)[0]
    xor_byte(paths.shard(2), offset, 1)
    name = str(paths.shard(2).relative_to(more))
    sample = part.rows_of(2)[4]
    (fault,) = dspark.verify_cache(more, deep=True).faults
    assert str(fault).startswith(f"{name}, dataset row {sample}, field {field.name}: its bytes")
    cache = dspark.open_cache(more, check_digests=True)
    assert len(cache[sample - 1]) == len(cache.manifest.all_fields)
    continued = f"dspark capture --extend --layers 0,1,2 --out {more}"
    with pytest.raises(IncompatibleCacheError, match=f"dataset row {sample} is damaged") as error:
        cache[sample]
    assert str(error.value).endswith(continued)

    kept = {p: p.stat().st_mtime_ns for p in more.rglob("shard-*") if p != paths.shard(2)}
    verify = ["dspark", "verify", "--cache", str(more), "--deep", "--repair", "--json"]
    code, printed = command(verify)
    assert code == 1
    document = json.loads(printed)
    assert document["repaired"] == {"shards": [], "files": [name], "busy": [], "sound": []}
    assert document["extend_commands"] == [continued]
    assert "hidden_states.1" not in dspark.open_cache(more)[sample]
    code, printed = command(["dspark", "verify", "--cache", str(more)])
    assert code == 0
    assert f"then: {continued}" in printed and "then: dspark capture --shards" not in printed
    assert (
        "plus1 (layers [0, 1, 2], logits none): not finished, 3 of 4 shards"
        in (command(["dspark", "inspect", "--cache", str(more)])[1])
    )
    code, printed = command(shlex.split(continued))
    assert code == 0
    assert "(1 written now" in printed
    assert digests(more) == digests(extended)
    del kept[paths.index(2)]
    assert all(p.stat().st_mtime_ns == mtime for p, mtime in kept.items())


def test_a_repair_of_the_first_files_leaves_the_added_ones(
    more: Path, extended: Path, inputs: Inputs
) -> None:
    first = CachePaths(more, SHARDS)
    first.shard(1).unlink()
    assert repair_cache(dspark.verify_cache(more)) == Repair((1,), (), ())
    dspark.capture(SHARDS, **options(inputs, more, drafts="msd"))
    assert digests(more) == digests(extended)


def test_lost_files_are_made_again(more: Path, extended: Path) -> None:
    paths = CachePaths(more, SHARDS, 1)
    paths.shard(1).unlink()
    paths.index(3).unlink()
    faults = [str(f) for f in dspark.verify_cache(more).faults]
    assert [f.partition(": ")[0] for f in faults] == [
        str(p.relative_to(more)) for p in (paths.shard(1), paths.index(3))
    ]
    report = dspark.capture(extend=True, drafts="dspark", out=str(more))
    assert report.shards_written == 2
    assert digests(more) == digests(extended)


def test_a_lost_manifest_costs_no_shard(more: Path, extended: Path, inputs: Inputs) -> None:
    (more / "manifest.json").unlink()
    with pytest.raises(InputError, match="no manifest, but shards of a capture with other"):
        dspark.capture(SHARDS, **options(inputs, more, drafts="msd", dtype="bf16"))
    assert dspark.capture(SHARDS, **options(inputs, more, drafts="msd")).shards_written == 0
    report = dspark.capture(extend=True, drafts="dspark", out=str(more))
    assert report.shards_written == 0 and report.added
    assert digests(more) == digests(extended)


def test_overwrite_needs_no_manifest(more: Path, captured: Path, inputs: Inputs) -> None:
    (more / "manifest.json").unlink()
    dspark.capture(SHARDS, **options(inputs, more, drafts="msd"), overwrite=True)
    assert digests(more) == digests(captured)


def test_overwrite_deletes_the_added_files_too(more: Path, captured: Path, inputs: Inputs) -> None:
    dspark.capture(SHARDS, **options(inputs, more, drafts="msd"), overwrite=True)
    assert digests(more) == digests(captured)
