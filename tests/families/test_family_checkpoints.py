"""``dspark.capture`` from end to end, through the processors of several families."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import assistant, mixed_rows, row, text, user, write_rows
from family_checkpoints import PROCESSORS, save_checkpoint
from family_models import STREAMS
from safetensors.torch import load_file
from tiny_targets import ENDOFTEXT, IM_END, VOCABULARY, chat_template, tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import dspark
from dspark.capture.conversations import open_conversations

LAYERS = (-1, 0, 1, 2)


def run_capture(target: Path, data: Path, out: Path, **options: Any) -> dspark.Cache:
    dspark.capture(
        2,
        target=str(target),
        data=str(data),
        out=str(out),
        **{
            "dtype": "fp32",
            "layers": ",".join(map(str, LAYERS)),
            "logits": "full",
            "batch_tokens": 1,  # one row a batch, so that the live run has the same shapes
            **options,
        },
    )
    return dspark.open_cache(out)


def layer_inputs(model: PreTrainedModel) -> tuple[dict[int, Tensor], Any]:
    """What each decoder layer receives, noted by wrapping its forward, and the model's call."""
    seen: dict[int, Tensor] = {}
    for i, layer in enumerate(model.get_decoder().layers):
        forward = layer.forward

        def wrapped(hidden: Tensor, *args: Any, _i: int = i, _f: Any = forward, **kw: Any) -> Any:
            seen[_i] = hidden.clone()
            return _f(hidden, *args, **kw)

        layer.forward = wrapped
    return seen, model


@pytest.mark.parametrize("family", PROCESSORS)
@torch.inference_mode()
def test_capture_through_the_processor(family: str, tmp_path: Path) -> None:
    assert family not in STREAMS
    folder = save_checkpoint(family, tmp_path / "target")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(3))
    cache = run_capture(folder, data, tmp_path / "c")
    assert cache.manifest.counts.ok == 3, cache.manifest.counts.skipped

    processor = AutoProcessor.from_pretrained(folder)
    if processor.chat_template is None:  # chameleon's only lies with the tokenizer
        processor.chat_template = processor.tokenizer.chat_template
    seen, model = layer_inputs(AutoModelForImageTextToText.from_pretrained(folder).eval())
    image_id = cache.manifest.target.image_token_id
    rows = open_conversations(data)
    for sample in range(3):
        inputs = processor.apply_chat_template(
            [rows.read(sample).messages], tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model(**inputs, use_cache=False)
        stored = cache[sample]
        ids = inputs["input_ids"][0]
        assert torch.equal(stored["input_ids"].long(), ids)
        assert torch.equal(stored["logits"], output.logits[0])
        last = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        assert torch.equal(stored["last_hidden_state"], last)
        for k in LAYERS:
            assert torch.equal(stored[f"hidden_states.{k}"], seen[k + 1][0]), k
        assert torch.equal(stored["image_mask"].bool(), ids == image_id)
        assert stored["image_mask"].any() == (sample > 0)


def tiny_text_model(kind: str) -> PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": IM_END,
        "pad_token_id": ENDOFTEXT,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**settings))
    return GraniteForCausalLM(GraniteConfig(**settings, embedding_multiplier=3.0))


TEXT_ROWS = [
    row(i, [user(text(f"What is {i}?")), assistant("A number."), user(text("?")), assistant("Yes")])
    for i in range(4)
]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "granite"])
@torch.inference_mode()
def test_text_only_targets(kind: str, tmp_path: Path) -> None:
    """``inputs_embeds`` is what the input embedding returns, also where the backbone scales it."""
    folder = tmp_path / "target"
    tiny_text_model(kind).save_pretrained(folder)
    made = tokenizer()
    made.chat_template = chat_template("")
    made.save_pretrained(folder)
    data = write_rows(tmp_path / "d.parquet", TEXT_ROWS)
    cache = run_capture(folder, data, tmp_path / "c")
    assert cache.manifest.counts.ok == len(TEXT_ROWS)
    assert cache.manifest.counts.image_tokens == 0
    assert cache.manifest.target.image_token_id is None
    assert cache.manifest.target.observed["inputs_embeds_from"] == "embedding"
    assert cache.manifest.target.observed["embedded_otherwise"] == []

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    byte_tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = load_file(cache.root / "target" / "head.safetensors")
    rows = open_conversations(data)
    for sample in range(len(TEXT_ROWS)):
        messages = [
            {"role": m["role"], "content": m["content"][0]["text"]}
            for m in rows.read(sample).messages
        ]
        inputs = byte_tokenizer.apply_chat_template(
            [messages], tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model(**inputs, output_hidden_states=True, use_cache=False)
        stored = cache[sample]
        ids = inputs["input_ids"][0]
        assert torch.equal(stored["input_ids"].long(), ids)
        assert torch.equal(stored["inputs_embeds"], weights["embed_tokens.weight"][ids])
        for k in LAYERS:
            assert torch.equal(stored[f"hidden_states.{k}"], output.hidden_states[k + 1][0]), k
        assert torch.equal(stored["last_hidden_state"], output.hidden_states[-1][0])
        assert torch.equal(stored["logits"], output.logits[0])
        assert torch.equal(stored["position_ids"], torch.arange(len(ids), dtype=torch.int32))
        assert not stored["image_mask"].any()
        assert stored["loss_mask"].sum() == len("A number.") + len("Yes") + 2
        scaled = not torch.equal(stored["inputs_embeds"], stored["hidden_states.-1"])
        assert scaled == (kind == "granite")


def test_the_manifest_says_how_features_come_about(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    for family, expected in {
        "granite4_vision": {
            "inputs_embeds_from": "argument",
            "side_inputs": ["deepstack_features", "vision_mask"],
            "averaged_streams": {},
            "pictures_enter": "side_inputs",
            "embedded_otherwise": [],
        },
        "ovis2": {
            "inputs_embeds_from": "argument",
            "side_inputs": [],
            "averaged_streams": {},
            "pictures_enter": "inputs_embeds",
            "embedded_otherwise": [265, 266, 267],  # its visual indicators
        },
    }.items():
        folder = save_checkpoint(family, tmp_path / family)
        run_capture(folder, data, tmp_path / f"{family}.cache", layers="none")
        manifest = json.loads((tmp_path / f"{family}.cache" / "manifest.json").read_text())
        assert manifest["target"]["observed"] == expected
        assert manifest["layers"] == {"output_of_layer": [], "huggingface_index": []}
