"""What options change of a training, and what they leave as it is."""

from pathlib import Path

import pytest
import torch
from runs import ARCHS, CONFIG, OPTIONS, assert_close_steps, config_of, records, steps
from safetensors.torch import load_file
from synthetic_cache import write_cache
from torch import nn
from torch._inductor import config as inductor

from dspark.schemas.errors import InputError
from dspark.train_from_cache import outputs, trainee
from dspark.train_from_cache.ema import Ema
from dspark.train_from_cache.train import train_draft, train_drafts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("options") / "cache")


def test_an_average_follows_its_formula_and_is_the_draft(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history: list[dict[str, torch.Tensor]] = []

    class Watched(Ema):
        def __init__(self, model: nn.Module, decay: float) -> None:
            super().__init__(model, decay)
            history.append({k: v.clone() for k, v in self.averages.items()})

        def update(self, step: int) -> None:
            super().update(step)
            history.append({k: v.detach().clone() for k, v in self._weights.items()})

    monkeypatch.setattr(trainee, "Ema", Watched)
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS, ema=0.3)
    want = {name: weight.double() for name, weight in history[0].items()}
    assert len(history) == 1 + OPTIONS["steps"]
    for step, weights in enumerate(history[1:]):
        decay = min(0.3, (1 + step) / (10 + step))
        want = {name: decay * want[name] + (1 - decay) * weights[name].double() for name in want}
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, average in want.items():
        torch.testing.assert_close(saved[name].double(), average, atol=1e-6, rtol=0)
        assert not torch.equal(saved[name], history[-1][name])

    plain = train_draft(cache, "msd", tmp_path / "plain", **OPTIONS)
    assert_close_steps(tmp_path / "out", tmp_path / "plain", 0)
    assert records(tmp_path / "out")[-1]["tau"] != plain.after["tau"]


def test_an_average_survives_an_interruption(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_draft(cache, "msd", tmp_path / "whole", **OPTIONS, ema=0.9)
    real = trainee.Trainee.update

    def stop(self: trainee.Trainee, step: int) -> float:
        if step == 8:
            raise RuntimeError
        return real(self, step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(trainee.Trainee, "update", stop)
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS, ema=0.9)
    with pytest.raises(InputError, match="--ema: 0.9 there, not given now"):
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS, resume=True)
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS, ema=0.9, resume=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_parts_of_a_batch_give_the_update_of_the_whole(cache: Path, tmp_path: Path) -> None:
    """Also where the terms of a loss have other denominators, and parts have unequal rows."""
    options = OPTIONS | {"steps": 3}
    for count in (1, 2, 5):
        out = tmp_path / str(count)
        train_drafts(cache, ARCHS, out, draft_config=CONFIG, **options, accumulate=count)
        for arch in ARCHS:
            assert_close_steps(out / arch, tmp_path / "1" / arch, 1e-6)


@pytest.mark.skipif(" " in torch.__file__, reason="torch compiles nothing in a path with blanks")
def test_a_compiled_draft_computes_the_same(cache: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"steps": 3}
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        config = config_of("dspark")
        train_draft(cache, "dspark", out, draft_config=config, **options, compile=compiled)
    assert_close_steps(tmp_path / "True", tmp_path / "False")
    assert len(steps(tmp_path / "True")) == 3


def test_what_cannot_be_compiled_is_one_sentence(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"^--compile: torch .*InvalidCxxCompiler.*leave") as told:
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS, compile=True)
    assert len(str(told.value).splitlines()) == 1
    torch._dynamo.reset()


def test_curves_may_also_go_to_wandb(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "is_wandb_available", lambda: False)
    with pytest.raises(InputError, match="--track wandb: wandb is not installed"):
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS, track="wandb")
    with pytest.raises(InputError, match="--track nowhere: choose wandb"):
        train_draft(cache, "msd", tmp_path / "out", **OPTIONS, track="nowhere")
    assert not (tmp_path / "out").exists()

    class Fake:
        logged: list[tuple[int, dict[str, float]]] = []

        def __init__(self, run_name: str, **settings: object) -> None:
            assert run_name == "dspark" and settings["name"] == str(tmp_path / "out")

        def start(self) -> None:
            pass

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            self.logged.append((-1, {}))

    monkeypatch.setattr(outputs, "is_wandb_available", lambda: True)
    monkeypatch.setattr(outputs, "WandBTracker", Fake)
    train_draft(cache, "msd", tmp_path / "out", **(OPTIONS | {"steps": 2}), track="wandb")
    assert [step for step, _ in Fake.logged] == [0, 1, 2, 2, -1]
    assert {"eval/tau", "eval/acceptance/0", "eval/text/tau"} <= Fake.logged[0][1].keys()
    assert {"train/loss", "train/terms/soft_ce", "train/lr"} <= Fake.logged[1][1].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema": 1.0}, "--ema 1.0: choose a decay from 0 to below 1"),
        ({"ema": "x"}, "--ema 'x': must be a number"),
        ({"accumulate": 0}, "--accumulate 0: must be greater than 0"),
        ({"accumulate": 6}, "--accumulate 6: an update of --batch-size 5 rows"),
        ({"accumulate": 1.5}, "--accumulate 1.5: must be a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(
    cache: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train_draft(cache, "msd", tmp_path / "out", **(OPTIONS | options))
