"""A fake picture takes a text-only row through the vision tower and changes nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import mixed_rows, noise_picture, write_rows
from target_processors import picture_processor
from tiny_targets import llava_processor
from transformers import AutoModelForImageTextToText, AutoProcessor

import dspark
from dspark.capture import HFMSDTargetModel, dspark_vlm_collate_fn
from dspark.capture.rendering.encode import encode, encode_batch
from dspark.capture.rendering.fake_image import needs_fake_image

FAMILIES = ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def talk(picture: Any, question: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if picture is not None:
        parts.insert(0, {"type": "image", "image": picture})
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes, and no."}]},
    ]


# A text-only row first. The fake picture has 4 x 4 positions: others have another size, and as many
# positions at another aspect.
MIXED = [
    talk(None, "Hi"),
    talk(noise_picture(0, (96, 64)), "what is it?"),
    talk(None, "And now something longer?"),
    talk(noise_picture(1, (128, 32)), "and this?"),
    talk(noise_picture(2, (32, 32)), "?"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_mixed_batch_are_as_alone(
    tiny_target: Callable[[str], Path], family: str
) -> None:
    folder = tiny_target(family)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    target = HFMSDTargetModel(model)
    batch = dspark_vlm_collate_fn([{"conversation": c} for c in MIXED], processor, max_length=128)
    loss_mask = batch.pop("loss_mask")
    together = target.generate_batch(loss_mask.bool(), batch)
    for i, conversation in enumerate(MIXED):
        alone = encode([conversation], processor)  # type: ignore[list-item]
        assert torch.equal(alone.pop("loss_mask")[0], loss_mask[i, : alone["input_ids"].shape[1]])
        length = alone["input_ids"].shape[1]
        assert torch.equal(alone["input_ids"][0], batch["input_ids"][i, :length])
        assert batch["attention_mask"][i].tolist() == [1] * length + [0] * (128 - length)
        with torch.no_grad():
            hidden = model.model(**alone, use_cache=False).last_hidden_state[0]
        # 1e-5: the noise of another batch shape, in values of size 1.
        torch.testing.assert_close(
            together.input_hidden_states[i, :length], hidden, rtol=1e-5, atol=1e-5
        )
        image_mask = alone["input_ids"][0] == target.image_token_id
        assert torch.equal(together.image_mask[i, : length - 1], image_mask[1:])
        assert not together.image_mask[i, length - 1 :].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_with_fake_pictures(
    tiny_target: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(9))
    options: dict[str, Any] = {"target": str(tiny_target(family)), "data": str(data)}
    options |= {"dtype": "fp32", "logits": "full"}
    for fake_image in ("never", "always"):
        dspark.capture(1, out=str(tmp_path / fake_image), fake_image=fake_image, **options)
    plain, fake = dspark.open_cache(tmp_path / "never"), dspark.open_cache(tmp_path / "always")
    for sample in range(9):
        expected, row = plain[sample], fake[sample]
        for key, value in expected.items():
            if value.is_floating_point():
                torch.testing.assert_close(row[key], value, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(row[key], value), (sample, key)


def test_only_who_asks_gets_fake_pictures() -> None:
    processor = llava_processor()
    needs = {o: needs_fake_image(o, processor) for o in ("auto", "always", "never")}
    assert needs == {"auto": False, "always": True, "never": False}
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    assert not needs_fake_image("always", tokenizer)


def test_a_picture_that_begins_with_a_line_break() -> None:
    """Gemma's pictures do, and the break would join the one at the end of the conversation."""
    processor = picture_processor("gemma3")
    conversation: Any = talk(None, "Hi")
    plain = encode([conversation], processor)["input_ids"][0]
    encoded = encode_batch([conversation], processor, fake_image=True)
    assert encoded.lengths == [len(plain)]
    assert torch.equal(encoded.tensors["input_ids"][0, : len(plain)], plain)
    soft = processor.tokenizer.convert_tokens_to_ids("<image_soft_token>")
    assert (encoded.tensors["input_ids"][0, len(plain) :] == soft).sum() == 4
    assert encoded.tensors["pixel_values"].shape[0] == 1
