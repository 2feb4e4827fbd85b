"""Fixed shapes and trimmed ones: the same training."""

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, OPTIONS, assert_close_steps, assert_same_weights, steps
from synthetic_cache import write_cache
from torch import Tensor
from torch._dynamo.utils import counters

from dspark.train_from_cache import loop, trainee
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.cache import open_cache
from dspark.train_from_cache.drafts import ARCHITECTURES
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.drafts.msd import MSDDraft
from dspark.train_from_cache.train import train_draft, train_drafts

LONGEST, T = 20, 48
MORE = {"medusa.num_heads": 3, "dflash.block_size": 4, "dflash.num_hidden_layers": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [8 + 5 * i % (LONGEST - 7) for i in range(40)]
    root = tmp_path_factory.mktemp("trim") / "cache"
    return write_cache(root, max_length=T, lengths=lengths, position_rows=3)


def test_all_drafts_have_the_same_losses(cache: Path, tmp_path: Path) -> None:
    """Up to rounding: sums over padded rows may be taken in another order."""
    options = OPTIONS | {"steps": 4}
    for trim in (False, True):
        out = tmp_path / str(trim)
        train_drafts(cache, ARCHITECTURES, out, draft_config=CONFIG | MORE, **options, trim=trim)
    for arch in ARCHITECTURES:
        assert_close_steps(tmp_path / "True" / arch, tmp_path / "False" / arch, 1e-5)
        assert len(steps(tmp_path / "True" / arch)) == 4


@pytest.mark.parametrize("trim", [False, True])
def test_what_shapes_a_draft_sees(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trim: bool
) -> None:
    """One shape in training unless trimmed; evaluation is always trimmed."""
    trained: list[tuple[torch.Size, int]] = []
    evaluated: list[int] = []
    forward, predict = MSDDraft.forward, MSDDraft.predict

    def training(self: MSDDraft, batch: Batch, *rest: Any) -> dict[str, LossTerm]:
        trained.append((batch["inputs_embeds"].shape, int(batch["length"].max())))
        return forward(self, batch, *rest)

    def evaluating(self: MSDDraft, batch: Batch, anchors: Anchors) -> Tensor:
        evaluated.append(batch["inputs_embeds"].shape[1])
        return predict(self, batch, anchors)

    monkeypatch.setattr(MSDDraft, "forward", training)
    monkeypatch.setattr(MSDDraft, "predict", evaluating)
    monkeypatch.setattr(loop, "quick_tau", lambda *_: None)
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS, trim=trim)
    assert len(trained) == OPTIONS["steps"]
    assert all(shape[:2] == (5, longest if trim else T) for shape, longest in trained)
    assert len({longest for _, longest in trained}) > 1
    assert evaluated and max(evaluated) <= LONGEST


def test_a_resumed_training_may_change_it(cache: Path, tmp_path: Path) -> None:
    train_draft(cache, "msd", tmp_path / "out", **OPTIONS)
    assert train_draft(
        cache, "msd", tmp_path / "out", **OPTIONS, trim=True, resume=True
    ).already_finished


def test_lengths_do_not_leak_from_one_batch_to_the_next(cache: Path, tmp_path: Path) -> None:
    """The buffers are reused; one training that reads all anew gives the same bits."""

    def copied(batches: Iterator[Batch]) -> Iterator[Batch]:
        opened = open_cache(cache)
        for batch in batches:
            whole = {}
            for name, tensor in batch.items():
                whole[name] = torch.zeros_like(tensor)
                if name in ("length", "sample"):
                    whole[name] = tensor
                    continue
                axis = opened.field(name).token_axis
                for i, sample in enumerate(batch["sample"].tolist()):
                    row = opened[sample][name]
                    whole[name][i].narrow(axis, 0, row.shape[axis]).copy_(row)
            yield whole

    train_draft(cache, "msd", tmp_path / "reused", **OPTIONS)
    real = loop.run
    with pytest.MonkeyPatch.context() as patch:
        from dspark.train_from_cache import train

        patch.setattr(train, "run", lambda *args: real(*args[:3], copied(iter(args[3])), *args[4:]))
        train_draft(cache, "msd", tmp_path / "anew", **OPTIONS)
    assert_same_weights(tmp_path / "reused", tmp_path / "anew")


def test_fixed_shapes_are_compiled_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervised tokens differ from step to step; nothing is compiled again for them."""
    seen: list[int] = []
    update = trainee.Trainee.update

    def counting(self: trainee.Trainee, step: int) -> float:
        seen.append(counters["stats"]["unique_graphs"])
        return update(self, step)

    # What is counted is traced before any backend sees it.
    monkeypatch.setattr(Draft, "compile", partialmethod(Draft.compile, backend="eager"))
    monkeypatch.setattr(trainee.Trainee, "update", counting)
    torch._dynamo.reset()
    counters.clear()
    train_draft(cache, "msd", tmp_path / "out", **(OPTIONS | {"log_every": 100}), compile=True)
    assert len(seen) == OPTIONS["steps"] and seen[0] > 0
    assert seen == seen[:1] * len(seen)
