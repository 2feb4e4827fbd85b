"""The live MSD target keeps the semantics of the API page that the project started from."""

from collections.abc import Callable
from pathlib import Path

import torch
from conversation_data import mixed_rows, write_rows
from tiny_targets import IMAGE
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

import dspark
from dspark.capture import HFMSDTargetModel
from dspark.capture.conversations import open_conversations


def inputs_for(target: Path, data: Path, rows: list[int]) -> dict[str, Tensor]:
    processor = AutoProcessor.from_pretrained(target)
    processor.tokenizer.padding_side = "right"
    conversations = open_conversations(data)
    return dict(
        processor.apply_chat_template(
            [conversations.read(i).messages for i in rows],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
    )


@torch.inference_mode()
def test_shifted_supervision(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_target("qwen2_5_vl")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(3))
    inputs = inputs_for(folder, data, [0, 1, 2])
    model = AutoModelForImageTextToText.from_pretrained(folder)
    target = HFMSDTargetModel(model)
    assert target.image_token_id == IMAGE
    assert target.get_lm_head() is model.lm_head
    length = inputs["input_ids"].shape[1]
    loss_mask = torch.ones(3, length, dtype=torch.bool)
    batch = target.generate_batch(loss_mask, inputs)

    output = model(**inputs, output_hidden_states=True, use_cache=False)
    embeds, last = output.hidden_states[0], output.hidden_states[-1]
    for b in range(3):
        for t in range(length - 1):
            assert torch.equal(batch.inputs_embeds[b, t], embeds[b, t + 1])
            assert torch.equal(batch.target_hidden_states[b, t], last[b, t + 1])
            assert torch.equal(batch.target_logits[b, t], output.logits[b, t + 1])
            assert batch.image_mask[b, t] == (inputs["input_ids"][b, t + 1] == IMAGE)
    assert torch.equal(batch.input_hidden_states, last)
    for tail in (batch.inputs_embeds, batch.target_hidden_states, batch.target_logits):
        assert not tail[:, -1].any()
    assert not batch.image_mask[:, -1].any()
    assert batch.attention_mask is inputs["attention_mask"]
    # The mask is aligned by the caller: not shifted again, only its last slot dropped.
    assert batch.loss_mask[:, :-1].all()
    assert not batch.loss_mask[:, -1].any()
    assert loss_mask.all(), "the caller's mask is left alone"


def test_the_cache_holds_the_same_numbers(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """What MSD derives from a cached row equals what the live target gives for that row."""
    folder = tiny_target("llava")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(3))
    dspark.capture(
        1,
        target=str(folder),
        data=str(data),
        out=str(tmp_path / "c"),
        dtype="fp32",
        logits="full",
        batch_tokens=1,  # one row a batch, so that the live run has the same shapes
    )
    cache = dspark.open_cache(tmp_path / "c")
    target = HFMSDTargetModel(AutoModelForImageTextToText.from_pretrained(folder))
    for sample in range(3):
        stored = cache[sample]
        next_supervised = torch.cat([stored["loss_mask"][1:], torch.zeros(1, dtype=torch.uint8)])
        batch = target.generate_batch(
            next_supervised[None].bool(), inputs_for(folder, data, [sample])
        )
        assert torch.equal(batch.inputs_embeds[0, :-1], stored["inputs_embeds"][1:])
        assert torch.equal(batch.input_hidden_states[0], stored["last_hidden_state"])
        assert torch.equal(batch.target_hidden_states[0, :-1], stored["last_hidden_state"][1:])
        assert torch.equal(batch.target_logits[0, :-1], stored["logits"][1:])
        assert torch.equal(batch.image_mask[0, :-1], stored["image_mask"][1:].bool())
        assert torch.equal(batch.loss_mask[0, :-1], stored["loss_mask"][1:].bool())
