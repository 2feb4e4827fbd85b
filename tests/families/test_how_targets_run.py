"""Options of loading and running change nothing but what they are for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from conversation_data import mixed_rows, write_rows
from family_checkpoints import save_checkpoint
from family_models import make_inputs, make_model
from torch import nn
from transformers import PreTrainedModel

import dspark
from dspark.capture.targets.backbone import find_backbone, find_head
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.loading import input_device
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.target import Target
from dspark.schemas.manifest import read_manifest

CPU = torch.device("cpu")


def target_of(model: PreTrainedModel) -> Target:
    processor = SimpleNamespace(tokenizer=None)
    return Target("tiny", "", "", model, processor, find_backbone(model), CPU)


def captured(target: Target, family: str, dtype: torch.dtype = torch.float32) -> Features:
    inputs, lengths = make_inputs(family)
    return capture_features(target, inputs, lengths, layers=[-1, 1], dtype=dtype, with_logits=True)


def same(one: Features, other: Features) -> bool:
    assert one.logits is not None
    assert other.logits is not None
    return torch.equal(one.logits, other.logits) and all(
        torch.equal(t, other.stored[k]) for k, t in one.stored.items()
    )


@pytest.mark.parametrize("family", ["kimi_k25", "gemma3n", "llava"])
def test_pictures_are_given_in_the_targets_own_type(family: str) -> None:
    """Several models cannot take fp32 pixels in bf16; the others cast them themselves."""
    target = target_of(make_model(family).bfloat16())
    got = captured(target, family, torch.bfloat16)
    inputs, lengths = make_inputs(family)
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.inference_mode():
        output = target.model(**inputs, use_cache=False)
    rows = [output.logits[b, :n] for b, n in enumerate(lengths)]
    assert got.logits is not None
    assert got.logits.dtype == torch.bfloat16
    assert torch.equal(got.logits, torch.cat(rows))


def test_weights_kept_elsewhere_between_calls(tmp_path: Path) -> None:
    """As ``--device-map auto`` leaves a model that is larger than its devices."""
    whole = target_of(make_model("llava"))
    expected = captured(whole, "llava")
    model = make_model("llava")
    accelerate.cpu_offload(model, execution_device=CPU)
    assert model.lm_head.weight.device.type == "meta"
    assert input_device(model) == CPU
    offloaded = target_of(model)
    got = captured(offloaded, "llava")
    assert same(got, expected)
    assert prove_head(offloaded, got) == prove_head(whole, expected)
    tensors, again = whole.head_tensors(), offloaded.head_tensors()
    assert (
        tensors.keys()
        == again.keys()
        == {
            "embed_tokens.weight",
            "lm_head.weight",
            "norm.weight",
        }
    )
    assert all(torch.equal(t, again[k]) for k, t in tensors.items())


def test_device_map_and_attention(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(3))

    def run(name: str, **options: Any) -> Path:
        dspark.capture(
            1, target=str(folder), data=str(data), out=str(tmp_path / name), dtype="fp32", **options
        )
        return tmp_path / name

    plain, mapped = run("plain"), run("mapped", device_map="auto")
    shard = "shards/shard-00000-of-00001.safetensors"
    assert (plain / shard).read_bytes() == (mapped / shard).read_bytes()
    assert (
        read_manifest(run("eager", attn_implementation="eager")).identity["target.attention"]
        == "eager"
    )
    assert read_manifest(plain).identity["target.attention"] == "sdpa"


def test_logits_are_the_models_own_when_the_named_head_is_not_called() -> None:
    model = make_model("llava")
    expected = captured(target_of(model), "llava")
    model.get_output_embeddings = lambda: nn.Linear(32, 7)
    assert same(captured(target_of(model), "llava"), expected)


def test_a_head_that_the_model_does_not_name() -> None:
    model = make_model("llava")
    head = model.lm_head
    model.get_output_embeddings = lambda: None
    assert find_head(model) is head
    target = target_of(model)
    assert prove_head(target, captured(target, "llava")) < 1e-5
    assert "lm_head.weight" in target.head_tensors()


def test_no_head_at_all() -> None:
    model = make_model("llava")
    model.get_output_embeddings = lambda: None
    projection = model.lm_head
    del model.lm_head
    model.lm_head = lambda hidden: projection(hidden)  # no module any more
    target = target_of(model)
    got = captured(target, "llava")
    assert target.head is None
    assert got.logits is not None
    with pytest.raises(Exception, match="names no head; use --logits full or --logits topk:64"):
        prove_head(target, got)
    assert "lm_head.weight" not in target.head_tensors()
