"""Several drafts measured side by side: ``dspark evaluate`` and ``evaluate_drafts``."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_cache import write_cache

import dspark
from dspark.cli import main
from dspark.reports import evaluation as report_evaluate
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.train_from_cache import compare, curves
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.calibration import Confidences
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.evaluate import Subject, evaluate, evaluate_together
from dspark.train_from_cache.metrics import eval_mask
from dspark.train_from_cache.part import Part
from dspark.train_from_cache.split import held_out, split_rows
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher
from dspark.train_from_cache.train import train_draft

SMALL: dict[str, dict[str, Any]] = {
    "msd": {},
    "dspark": {"num_hidden_layers": "1", "block_size": "4", "markov_rank": "8"},
    "medusa": {"num_heads": "2"},
}
FRACTION = 0.3


def fit(cache: Path, out: Path, arch: str, **options: Any) -> dict[str, Any]:
    merged = {
        "steps": 4, "batch_size": 8, "device": "cpu", "progress": False,
        "eval_fraction": FRACTION, "draft_config": SMALL[arch], "lr": 3e-3,
    } | options  # fmt: skip
    return train_draft(cache, arch, out, **merged).after


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("evaluate") / "cache", samples=60)


@pytest.fixture(scope="module")
def drafts(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained drafts by name, ``control`` being one that was trained on zeros."""
    root = tmp_path_factory.mktemp("drafts")
    for arch in SMALL:
        fit(cache, root / arch, arch)
    fit(cache, root / "control", "msd", zero_hidden_states=True)
    return {name: root / name for name in (*SMALL, "control")}


def after(draft: Path) -> dict[str, Any]:
    record = json.loads((draft / "metrics.jsonl").read_text().splitlines()[-1])
    return {k: v for k, v in record.items() if k not in ("event", "when", "step")}


def assert_equal(got: Any, want: Any, name: str = "") -> None:
    if isinstance(want, dict):
        assert isinstance(got, dict) and want.keys() <= got.keys()
        for key in want:
            assert_equal(got[key], want[key], f"{name}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), name
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other, name)
    else:
        assert got == (pytest.approx(want, abs=1e-6) if isinstance(want, float) else want), name


def test_all_drafts_as_their_trainings_measured_them_in_one_pass(
    cache: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = Part.read_row

    def counting(self: Part, sample: int, *args: Any) -> int:
        read.append(sample)
        return real(self, sample, *args)

    monkeypatch.setattr(Part, "read_row", counting)
    found = dspark.evaluate_drafts(cache, list(drafts.values()), device="cpu")
    rows = list(split_rows(ok_rows(open_cache(cache)), FRACTION)[1])
    assert (found["rows"], found["eval_fraction"]) == (len(rows), FRACTION)
    for name, got in zip(drafts, found["drafts"], strict=True):
        assert got["draft"] == str(drafts[name])
        assert got["arch"] == ("msd" if name == "control" else name)
        assert got["zero_hidden_states"] is (name == "control")
        assert got["rows_trained_on"] == 0
        assert (got["calibration"] is not None) == (name == "dspark")
        assert_equal(got, after(drafts[name]))
    # Each field of each row once, for all drafts together.
    union = {"input_ids", "loss_mask", "attention_mask", "image_mask", "inputs_embeds"}
    union |= {"last_hidden_state", *(f"hidden_states.{k}" for k in (0, 1, 2, 3, 4))}
    stored = {f.name for f in open_cache(cache).manifest.fields}
    assert sorted(read) == sorted(rows * len(union & stored))


def test_calibration_is_fitted_on_every_other_row_and_measured_on_the_rest(
    cache: Path, drafts: dict[str, Path]
) -> None:
    """The same sums from whole rows, one at a time."""
    (found,) = dspark.evaluate_drafts(cache, [drafts["dspark"]], device="cpu")["drafts"]
    opened, head = open_cache(cache), TargetHead.load(cache)
    cls = draft_class("dspark")
    draft = cls.from_pretrained(drafts["dspark"])
    draft.attach_head(head)
    draft.eval()
    expected = Confidences()
    for i, row in enumerate(split_rows(ok_rows(opened), FRACTION)[1]):
        batch = {name: x[None] for name, x in opened[row].items()}
        batch |= {"length": torch.tensor([opened.lengths[row]]), "sample": torch.tensor([row])}
        anchors = supervised_anchors(batch["loss_mask"])
        mask = eval_mask(batch, anchors, draft.depth)
        stated = draft.confidence_logits(batch, anchors)
        proposed = draft.predict(batch, anchors).softmax(-1)
        accept = torch.zeros(mask.shape, dtype=torch.float64)
        teacher = Teacher(batch, head)
        for n, a in enumerate(anchors.position.tolist()):
            for k in range(int(mask[n].sum())):
                target = teacher.logits(torch.tensor(0), torch.tensor(a + k)).softmax(-1)
                accept[n, k] = 1 - 0.5 * (proposed[n, k] - target).abs().sum()
        expected.update(stated, accept, mask, torch.full((len(anchors),), i % 2 == 0))
    want = expected.result()
    assert want is not None and want["anchors"] > 20 < want["fit_anchors"]
    got = found["calibration"]
    assert got["temperatures"] == want["temperatures"]
    assert_equal(got, want)


def test_zeros_for_the_hidden_states(cache: Path, drafts: dict[str, Path]) -> None:
    plain, zeroed = (
        dspark.evaluate_drafts(
            cache, [drafts["msd"], drafts["control"]], zero_hidden_states=zero, device="cpu"
        )["drafts"]
        for zero in (False, True)
    )
    assert plain[1] == zeroed[1], "a control is always measured as it was trained"
    assert plain[0]["tau"] != zeroed[0]["tau"] and zeroed[0]["zero_hidden_states"]
    opened, head = open_cache(cache), TargetHead.load(cache)
    draft = draft_class("msd").from_pretrained(drafts["msd"])
    draft.attach_head(head)
    rows = list(split_rows(ok_rows(opened), FRACTION)[1])
    alone = evaluate(draft, opened, head, rows, zero_hidden_states=True)
    assert_equal(zeroed[0], alone)


def test_a_draft_is_measured_alike_alone_and_beside_a_deeper_one(
    cache: Path, drafts: dict[str, Path]
) -> None:
    (alone,) = dspark.evaluate_drafts(cache, [drafts["medusa"]], device="cpu")["drafts"]
    together = dspark.evaluate_drafts(cache, [drafts["msd"], drafts["medusa"]], device="cpu")
    assert_equal(together["drafts"][1], alone)


def test_which_rows_are_measured(cache: Path, drafts: dict[str, Path]) -> None:
    opened = open_cache(cache)
    train, rest = split_rows(ok_rows(opened), FRACTION)
    ok = np.array(ok_rows(opened))

    def measure(**options: Any) -> tuple[int, int]:
        found = dspark.evaluate_drafts(cache, [drafts["medusa"]], device="cpu", **options)
        assert found["rows"] == found["drafts"][0]["rows"]
        return found["rows"], found["drafts"][0]["rows_trained_on"]

    assert measure() == (len(rest), 0)
    assert measure(rows=5) == (5, 0)
    assert measure(rows=1000) == (len(rest), 0)
    assert measure(all_rows=True) == (len(ok), len(train))
    assert measure(eval_fraction=0.1) == (held_out(ok, 0.1).sum(), 0)
    assert measure(eval_fraction=0.6) == (
        held_out(ok, 0.6).sum(),
        (held_out(ok, 0.6) & ~held_out(ok, 0.3)).sum(),
    )
    chosen = compare._rows(opened, FRACTION, 5)
    assert set(chosen) <= set(rest) and len(set(chosen)) == 5
    assert (chosen[0], chosen[-1]) == (rest[0], rest[-1])


def test_held_out_rows_are_nested() -> None:
    rows = np.arange(2000)
    assert not (held_out(rows, 0.1) & ~held_out(rows, 0.3)).any()
    assert 150 < held_out(rows, 0.1).sum() < 250


def copy(draft: Path, to: Path, **options: Any) -> Path:
    """A copy of a trained draft with other entries in its ``training.json``."""
    shutil.copytree(draft, to)
    settings = json.loads((to / "training.json").read_text())
    settings["options"] |= options
    (to / "training.json").write_text(json.dumps(settings))
    return to


def test_drafts_that_held_out_different_rows(
    cache: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    other = copy(drafts["medusa"], tmp_path / "other", eval_fraction=0.2)
    both = [drafts["medusa"], other]
    with pytest.raises(InputError, match=r"medusa 0\.3, .*other 0\.2.*give --eval-fraction"):
        dspark.evaluate_drafts(cache, both, device="cpu")
    found = dspark.evaluate_drafts(cache, both, eval_fraction=0.3, device="cpu")
    seen = [draft["rows_trained_on"] for draft in found["drafts"]]
    assert seen[0] == 0 < seen[1]
    assert "other: was trained on" in report_evaluate.evaluation(found)
    all_used = copy(drafts["medusa"], tmp_path / "all", eval_fraction=0.0)
    with pytest.raises(InputError, match="trained with --eval-fraction 0, on all rows"):
        dspark.evaluate_drafts(cache, [all_used], device="cpu")


def test_a_published_draft_has_no_training(
    cache: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        tmp_path.joinpath("published").mkdir(exist_ok=True)
        shutil.copy(drafts["medusa"] / name, tmp_path / "published" / name)
    found = dspark.evaluate_drafts(cache, [tmp_path / "published"], device="cpu")
    assert found["eval_fraction"] == 0.1 and found["drafts"][0]["rows_trained_on"] is None
    both = [tmp_path / "published", drafts["medusa"]]
    found = dspark.evaluate_drafts(cache, both, device="cpu")
    assert found["eval_fraction"] == FRACTION
    assert_equal(found["drafts"][0], after(drafts["medusa"]))


def test_another_dataset_is_new_to_a_draft(drafts: dict[str, Path], tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", samples=20, seed=0)
    manifest = json.loads((root / "manifest.json").read_text())
    assert "data" not in manifest["identity"]
    settings = json.loads((drafts["medusa"] / "training.json").read_text())
    settings["cache"]["data"] = "another"
    shutil.copytree(drafts["medusa"], tmp_path / "draft")
    (tmp_path / "draft" / "training.json").write_text(json.dumps(settings))
    found = dspark.evaluate_drafts(root, [tmp_path / "draft"], all_rows=True, device="cpu")
    assert found["drafts"][0]["rows_trained_on"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "--rows 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"eval_fraction": 0.0}, "--eval-fraction 0.0: choose from above 0"),
        ({"eval_fraction": 1.0}, "--eval-fraction 1.0"),
        ({"eval_fraction": 1e-6}, "holds out none of the 52 samples"),
        ({"eval_fraction": 0.1, "all_rows": True}, "--all-rows and --eval-fraction"),
        ({"device": "tpu"}, "--device tpu"),
    ],
)
def test_wrong_options_are_refused(
    cache: Path, drafts: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        dspark.evaluate_drafts(cache, [drafts["medusa"]], **{"device": "cpu", **options})


def test_what_is_no_draft_of_this_target_is_refused(
    cache: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    def refused(message: str, *folders: Path, root: Path = cache) -> None:
        with pytest.raises(InputError, match=message):
            dspark.evaluate_drafts(root, folders, device="cpu")

    refused("--draft: name at least one")
    refused("--draft .*nowhere: there is no config.json", tmp_path / "nowhere")
    wrong = shutil.copytree(drafts["medusa"], tmp_path / "wrong")
    (wrong / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    refused("none of the drafts known here: .*MedusaModel", drafts["msd"], wrong)
    (wrong / "config.json").write_text("[")
    refused("config.json: not readable", wrong)
    config = json.loads((drafts["medusa"] / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))
    refused("made for another target: its hidden_size is 8, the cache's 16", wrong)
    (wrong / "config.json").write_text(json.dumps(config))
    tensors = load_file(wrong / "model.safetensors")
    del tensors["lm_heads.0.weight"]
    save_file(tensors, wrong / "model.safetensors")
    refused(r"--draft .*wrong: not the tensors.*missing lm_heads\.0\.weight", wrong)
    wrong = shutil.copytree(drafts["medusa"], tmp_path / "settings")
    (wrong / "training.json").write_text('{"options": {}}')
    refused("training.json: not readable", wrong)

    bare = write_cache(tmp_path / "bare", layers=(0, 1))
    with pytest.raises(IncompatibleCacheError, match=r"'dspark' needs hidden_states\.2.*--"):
        dspark.evaluate_drafts(bare, [drafts["medusa"], drafts["dspark"]], device="cpu")


def run(args: list[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", "evaluate", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command_prints_one_column_for_each_draft(
    cache: Path,
    drafts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("dspark", "medusa", "control")
    args = ["--cache", cache, "--device", "cpu"]
    args += [part for name in names for part in ("--draft", drafts[name])]
    assert run([*args, "--json"], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert [draft["draft"] for draft in found["drafts"]] == [str(drafts[name]) for name in names]

    assert run(args, monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == report_evaluate.evaluation(found)
    lines = text.splitlines()
    assert lines[0].endswith("rows (held out by --eval-fraction 0.3)")
    assert "control: zeros in place of the target's hidden states" in lines
    (row,) = [line for line in lines if line.startswith("tau: tokens per round")]
    assert row.split()[-3:] == [f"{draft['tau']:.2f}" for draft in found["drafts"]]
    (row,) = [line for line in lines if line.startswith("of tokens 1 to 4 together")]
    shown = [f"{100 * found['drafts'][i]['prefix'][3]:.1f}" for i in (0, 2)]
    assert [word for word in row.split()[6:] if word != "%"] == shown, "medusa has two heads"
    for title in ("rows with a picture", "text-only rows", "calibration error"):
        assert any(line.startswith(title) for line in lines)
    assert not any(line.startswith("picture-grounded tokens") for line in lines)

    assert run(["--cache", cache, "--draft", cache], monkeypatch) == 2
    assert "there is no config.json" in capsys.readouterr().err


def test_drafts_of_one_name_are_told_apart(
    cache: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    twin = copy(drafts["medusa"], tmp_path / "medusa")
    found = dspark.evaluate_drafts(cache, [drafts["medusa"], twin], device="cpu", rows=2)
    header = report_evaluate.evaluation(found).splitlines()[2]
    assert header.split()[1:] == [str(drafts["medusa"]), str(twin)]


def test_rows_without_an_anchor(drafts: dict[str, Path], tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", lengths=[1] * 40)
    found = dspark.evaluate_drafts(root, [drafts["dspark"]], all_rows=True, device="cpu")
    (draft,) = found["drafts"]
    assert draft["tau"] is draft["calibration"] is None and draft["anchors"] == 0
    assert "tau" in report_evaluate.evaluation(found)


def test_one_pass_serves_a_draft_with_and_without_zeros(cache: Path) -> None:
    opened, head = open_cache(cache), TargetHead.load(cache)
    cls = draft_class("msd")
    draft = cls(cls.config_from_cache(opened.manifest, {}))
    draft.attach_head(head)
    rows = ok_rows(opened)[:6]
    subjects = [Subject(draft), Subject(draft, zero_hidden_states=True), Subject(draft)]
    one, zeroed, again = evaluate_together(subjects, opened, head, rows)
    assert one == again != zeroed and "calibration" not in one


def test_curves_are_drawn_or_said_how_to_get(
    drafts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(drafts["msd"], tmp_path / "msd")
    (out / curves.CURVES).unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert "pip install 'dspark[plots]'" in curves.plot_curves(out)
    assert not (out / curves.CURVES).exists()
    pytest.importorskip("matplotlib")
    assert curves.plot_curves(out) == f"curves in {out}/curves.png"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("*.tmp"))
    curves.plot_curves(tmp_path)  # nothing was recorded yet
    assert (tmp_path / "curves.png").exists()
