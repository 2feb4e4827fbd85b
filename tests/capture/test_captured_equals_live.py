"""Every cached tensor is what the live target computes, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import mixed_rows, write_rows
from tiny_targets import IMAGE
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

import dspark
from dspark.bundled import TARGET, TRAIN_DATA
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations, open_conversations

LAYERS = (-1, 0, 1, 2)
BATCH_TOKENS = 700


class LayerInputs:
    """What each decoder layer receives, noted by wrapping its forward: no hook, no recorder."""

    def __init__(self, layers: Any) -> None:
        self.seen: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            layer.forward = self._wrap(i, layer.forward)

    def _wrap(self, i: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen[i] = hidden_states.clone()
            return forward(hidden_states, *args, **kwargs)

        return wrapped


@torch.inference_mode()
def live_rows(
    target: Path, conversations: Conversations, samples: range, dtype: torch.dtype
) -> dict[int, dict[str, Tensor]]:
    """The same batches as the capture's, through ``output_hidden_states=True``."""
    model = AutoModelForImageTextToText.from_pretrained(target, dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(target)
    processor.tokenizer.padding_side = "right"
    inputs = LayerInputs(model.get_decoder().layers)
    image_id = model.config.image_token_id

    def render(rows: list[int]) -> dict[str, Tensor]:
        return processor.apply_chat_template(
            [conversations.read(i).messages for i in rows],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )

    lengths = [render([i])["input_ids"].shape[1] for i in samples]
    out: dict[int, dict[str, Tensor]] = {}
    for batch in plan_batches(lengths, BATCH_TOKENS):
        rows = [samples[i] for i in batch]
        tensors = render(rows)
        output = model(**tensors, output_hidden_states=True, use_cache=False)
        hidden = output.hidden_states
        embeds = model.get_input_embeddings()(tensors["input_ids"])
        for b, sample in enumerate(rows):
            n = lengths[sample - samples.start]
            text = tensors["input_ids"][b, :n] != image_id
            out[sample] = {
                "input_ids": tensors["input_ids"][b, :n].int(),
                "text_embeds": embeds[b, :n][text].to(dtype),
                "text": text,
                "inputs_embeds": hidden[0][b, :n].to(dtype),
                "last_hidden_state": hidden[-1][b, :n].to(dtype),
                "logits": output.logits[b, :n].to(dtype),
                **{f"hf.{k}": hidden[k + 1][b, :n].to(dtype) for k in LAYERS},
                **{f"next.{k}": inputs.seen[k + 1][b, :n].to(dtype) for k in LAYERS},
            }
    return out


def check(cache: dspark.Cache, live: dict[int, dict[str, Tensor]], deepstack: bool) -> None:
    image_id = cache.manifest.target.image_token_id
    for sample, expected in live.items():
        stored = cache[sample]
        for name in ("input_ids", "inputs_embeds", "last_hidden_state"):
            assert torch.equal(stored[name], expected[name]), (sample, name)
        assert torch.equal(stored["inputs_embeds"][expected["text"]], expected["text_embeds"])
        assert torch.equal(stored["image_mask"].bool(), expected["input_ids"] == image_id)
        assert stored["attention_mask"].all()
        for k in LAYERS:
            key = f"hidden_states.{k}"
            assert torch.equal(stored[key], expected[f"next.{k}"]), (sample, key)
            if not deepstack:
                assert torch.equal(stored[key], expected[f"hf.{k}"]), (sample, key)
        assert torch.equal(stored["logits"], expected["logits"]), sample


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_tiny_targets(
    family: str, dtype: str, tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tiny_target(family)
    data = write_rows(tmp_path / "data.parquet", mixed_rows(14))
    dspark.capture(
        2,
        target=str(target),
        data=str(data),
        out=str(tmp_path / "cache"),
        dtype=dtype,
        layers=",".join(map(str, LAYERS)),
        logits="full",
        batch_tokens=BATCH_TOKENS,
    )
    cache = dspark.open_cache(tmp_path / "cache")
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for samples in (range(0, 7), range(7, 14)):
        live = live_rows(target, open_conversations(data), samples, torch_dtype)
        check(cache, live, deepstack=family == "qwen3_vl")


def test_deepstack_layers_differ_from_the_layer_outputs(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """The point of storing what the next layer receives: at picture positions they differ."""
    target = tiny_target("qwen3_vl")
    data = write_rows(tmp_path / "data.parquet", mixed_rows(3))
    live = live_rows(target, open_conversations(data), range(3), torch.float32)
    picture = live[1]["input_ids"] == IMAGE
    assert not torch.equal(live[1]["next.0"][picture], live[1]["hf.0"][picture])
    assert torch.equal(live[1]["next.0"][~picture], live[1]["hf.0"][~picture])


def test_bundled_target(tmp_path: Path) -> None:
    dspark.capture(
        2,
        out=str(tmp_path / "cache"),
        dtype="fp32",
        layers=",".join(map(str, LAYERS)),
        logits="full",
        limit=24,
        batch_tokens=BATCH_TOKENS,
    )
    cache = dspark.open_cache(tmp_path / "cache")
    conversations = open_conversations(TRAIN_DATA)
    for samples in (range(0, 12), range(12, 24)):
        check(cache, live_rows(TARGET, conversations, samples, torch.float32), deepstack=False)


def test_position_ids_are_the_targets_own(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """mRoPE rows against ``get_rope_index`` called directly; plain models count from 0."""
    data = write_rows(tmp_path / "data.parquet", mixed_rows(9))
    for family in ("qwen2_5_vl", "llava"):
        target = tiny_target(family)
        out = tmp_path / family
        dspark.capture(2, target=str(target), data=str(data), out=str(out))
        cache = dspark.open_cache(out)
        model = AutoModelForImageTextToText.from_pretrained(target)
        processor = AutoProcessor.from_pretrained(target)
        conversations = open_conversations(data)
        for sample in range(9):
            inputs = processor.apply_chat_template(
                [conversations.read(sample).messages],
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            length = inputs["input_ids"].shape[1]
            expected = torch.arange(length, dtype=torch.int32)
            if family == "qwen2_5_vl":
                expected = expected.expand(3, -1)
                if "image_grid_thw" in inputs:
                    positions, _ = model.model.get_rope_index(
                        inputs["input_ids"],
                        inputs["mm_token_type_ids"],
                        image_grid_thw=inputs["image_grid_thw"],
                    )
                    expected = positions[:, 0].int()
            assert torch.equal(cache[sample]["position_ids"], expected), (family, sample)
