"""What is kept of the logits: the target's own, a top k of them, or a proved head."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import mixed_rows, write_rows
from safetensors.torch import load_file
from tiny_targets import VOCABULARY

import dspark
from dspark.capture.targets.features import capture_features
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.logits_mode import resolve_logits
from dspark.capture.targets.probe import PICTURES, probe_inputs
from dspark.schemas.errors import InputError


@pytest.fixture
def caches(tiny_target: Callable[[str], Path], tmp_path: Path) -> Callable[[str], dspark.Cache]:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(6))

    def capture(logits: str) -> dspark.Cache:
        out = tmp_path / logits.replace(":", "-")
        dspark.capture(
            2,
            target=str(tiny_target("llava")),
            data=str(data),
            out=str(out),
            logits=logits,
            dtype="fp32",
        )
        return dspark.open_cache(out)

    return capture


def test_topk(caches: Callable[[str], dspark.Cache]) -> None:
    full, top = caches("full"), caches("topk:5")
    for sample in range(6):
        logits = full[sample]["logits"]
        stored = top[sample]
        for t in (0, len(logits) // 2, len(logits) - 1):
            order = sorted(range(logits.shape[1]), key=lambda v: -logits[t, v].item())[:5]
            assert stored["logits_topk.indices"][t].tolist() == order
            assert stored["logits_topk.values"][t].tolist() == logits[t, order].tolist()
            exact = math.log(sum(math.exp(x) for x in logits[t].double().tolist()))
            assert stored["logits_topk.logsumexp"][t].item() == pytest.approx(exact, rel=1e-6)


def test_head_gives_the_logits_back(caches: Callable[[str], dspark.Cache]) -> None:
    full, head = caches("full"), caches("head")
    assert head.manifest.field("logits") is None
    weights = load_file(head.root / "target" / "head.safetensors")
    for sample in range(6):
        again = head[sample]["last_hidden_state"] @ weights["lm_head.weight"].T
        # Same maths, another matrix shape: summation order may differ.
        assert torch.allclose(again, full[sample]["logits"], atol=1e-5)
    assert head.manifest.head_error is not None
    assert head.manifest.head_error < 1e-5


def test_stored_head_is_what_the_modules_return(
    caches: Callable[[str], dspark.Cache], tiny_target: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForImageTextToText

    weights = load_file(caches("head").root / "target" / "head.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(tiny_target("llava"))
    ids = torch.arange(model.get_input_embeddings().weight.shape[0])
    assert torch.equal(weights["embed_tokens.weight"], model.get_input_embeddings()(ids))
    assert torch.equal(weights["norm.weight"], model.get_decoder().norm.weight)


@pytest.mark.parametrize(
    "change",
    [lambda z: 3.0 * torch.tanh(z / 3.0), lambda z: z * 0.0625, lambda z: z + 0.01],
    ids=["soft-cap", "scale", "offset"],
)
def test_a_target_that_bends_its_logits_is_refused(
    tiny_target: Callable[[str], Path], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    target = load_target(str(tiny_target("llava")), torch.device("cpu"))
    inputs = probe_inputs(target, PICTURES[0])
    features = capture_features(
        target,
        inputs,
        [inputs["input_ids"].shape[1]],
        layers=[],
        dtype=torch.float32,
        with_logits=True,
    )
    assert features.logits is not None
    assert prove_head(target, features) < 1e-5
    bent = replace(features, logits=change(features.logits))
    with pytest.raises(InputError, match="--logits full or --logits topk:64"):
        prove_head(target, bent)


def test_auto() -> None:
    choose = {"hidden_size": 128, "hidden_fields": 5}
    assert resolve_logits("auto", vocab_size=640, **choose) == "full"
    assert resolve_logits("auto", vocab_size=641, **choose) == "head"


def test_many_logits_come_in_parts(
    caches: Callable[[str], dspark.Cache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {mode: caches(mode) for mode in ("full", "topk:5", "head")}
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def noting(hidden: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if weight.shape[0] == VOCABULARY:
            seen.append(hidden.numel() // hidden.shape[-1])
        return linear(hidden, weight, bias)

    monkeypatch.setattr("dspark.capture.batch.LOGITS_AT_ONCE", 7 * VOCABULARY)
    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    for mode, expected in whole.items():
        seen.clear()
        expected.root.rename(tmp_path / "whole")
        parts = caches(mode)
        (tmp_path / "whole").rename(tmp_path / f"whole-{mode[:4]}")
        of_rows = [count for count in seen if count != seen[0]]  # the first ones are of the probe
        assert of_rows and max(of_rows) == 7
        for sample in range(6):
            for key, value in dspark.open_cache(tmp_path / f"whole-{mode[:4]}")[sample].items():
                torch.testing.assert_close(parts[sample][key], value, rtol=1e-5, atol=1e-5)
