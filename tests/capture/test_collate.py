"""``dspark_vlm_collate_fn`` on cases worked by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import noise_picture
from tiny_targets import (
    ENDOFTEXT,
    IM_END,
    IM_START,
    IMAGE,
    VISION_END,
    VISION_START,
    qwen_processor,
    tokenizer,
)

from dspark.capture import build_dspark_vlm_dataloader, dspark_vlm_collate_fn

T = 96


def ids(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def turn(role: str, *parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": role, "content": content}


def rendered(role: str, content: list[int]) -> list[int]:
    return [IM_START, *ids(f"{role}\n"), *content, IM_END, *ids("\n")]


def supervised(content: list[int]) -> list[int]:
    """The loss mask of a rendered assistant turn: its text and end token, nothing else."""
    return [0] * (1 + len(ids("assistant\n"))) + [1] * (len(content) + 1) + [0]


def test_text_and_picture_by_hand() -> None:
    picture = noise_picture(0, (32, 32))  # 2 x 2 tokens of 16 pixels
    examples = [
        {"conversation": [turn("user", picture, "Hi"), turn("assistant", "Ok")]},
        {
            "conversation": [
                turn("user", "Hi"),
                turn("assistant", "No"),
                turn("user", "x"),
                turn("assistant", "y"),
            ]
        },
    ]
    batch = dspark_vlm_collate_fn(examples, qwen_processor(), max_length=T)

    span = [VISION_START, *[IMAGE] * 4, VISION_END]
    first = [*rendered("user", [*span, *ids("Hi")]), *rendered("assistant", ids("Ok"))]
    row = batch["input_ids"][0].tolist()
    assert row == first + [ENDOFTEXT] * (T - len(first))
    assert batch["attention_mask"][0].tolist() == [1] * len(first) + [0] * (T - len(first))
    user = len(rendered("user", [*span, *ids("Hi")]))
    expected = [0] * user + supervised(ids("Ok"))
    assert batch["loss_mask"][0].tolist() == expected + [0] * (T - len(first))

    # The text-only row gets a fake picture (64 x 64: 16 tokens), last, which no token can see.
    fake = [VISION_START, *[IMAGE] * 16, VISION_END]
    second = [
        *rendered("user", ids("Hi")),
        *rendered("assistant", ids("No")),
        *rendered("user", ids("x")),
        *rendered("assistant", ids("y")),
    ]
    padding = T - len(second) - len(fake)
    assert batch["input_ids"][1].tolist() == second + fake + [ENDOFTEXT] * padding
    assert batch["attention_mask"][1].tolist() == [1] * len(second) + [0] * (T - len(second))
    mask = [
        *[0] * len(rendered("user", ids("Hi"))),
        *supervised(ids("No")),
        *[0] * len(rendered("user", ids("x"))),
        *supervised(ids("y")),
    ]
    assert batch["loss_mask"][1].tolist() == mask + [0] * (T - len(second))
    assert "labels" not in batch
    # One real and one fake picture reach the vision tower.
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 8, 8]]


def test_every_processor_key_is_kept() -> None:
    example = {"conversation": [turn("user", noise_picture(1, (32, 32))), turn("assistant", "a")]}
    processor = qwen_processor()
    keys = set(
        processor.apply_chat_template(
            [example["conversation"]], tokenize=True, return_dict=True, return_tensors="pt"
        )
    )
    assert "image_grid_thw" in keys
    assert set(dspark_vlm_collate_fn([example], processor, 64)) == keys | {"loss_mask"}


def test_too_long_is_named_not_cut() -> None:
    example = {"conversation": [turn("user", "x" * 90), turn("assistant", "a")]}
    with pytest.raises(ValueError, match="example 0: .* max_length is 96"):
        dspark_vlm_collate_fn([example], qwen_processor(), T)


def test_a_control_token_in_a_text_is_refused() -> None:
    example = {"conversation": [turn("user", "see <|image_pad|>"), turn("assistant", "a")]}
    with pytest.raises(ValueError, match="control token <|image_pad|>"):
        dspark_vlm_collate_fn([example], qwen_processor(), 64)


class ListConfig:
    """A config node of the ``.instantiate()`` convention."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def instantiate(self) -> list[dict[str, Any]]:
        return self.examples


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataloader(num_workers: int) -> None:
    examples = [
        {"conversation": [turn("user", f"q{i}"), turn("assistant", "a" * i)]} for i in range(1, 6)
    ]
    loader = build_dspark_vlm_dataloader(
        ListConfig(examples),
        qwen_processor(),
        batch_size=2,
        max_length=64,
        shuffle=False,
        num_workers=num_workers,
    )
    batches = list(loader)
    assert [b["input_ids"].shape for b in batches] == [(2, 64), (2, 64), (1, 64)]
    supervised_tokens = torch.cat([b["loss_mask"].sum(1) for b in batches])
    assert supervised_tokens.tolist() == [2, 3, 4, 5, 6]


def test_features_follow_the_picture(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    """Blanking the picture changes what is captured from the picture on, and nothing before."""
    from conversation_data import IMAGE as IMAGE_PART
    from conversation_data import assistant, row, text, user, write_rows
    from PIL import Image

    import dspark

    messages = [user(text("Look: "), IMAGE_PART, text("what?")), assistant("A cat.")]
    rows = [
        row(0, messages, [noise_picture(5, (64, 32))]),
        row(1, messages, [Image.new("RGB", (64, 32))]),
    ]
    data = write_rows(tmp_path / "d.parquet", rows)
    target = tiny_target("qwen2_5_vl")
    dspark.capture(1, target=str(target), data=str(data), out=str(tmp_path / "c"), dtype="fp32")
    cache = dspark.open_cache(tmp_path / "c")
    seen, blank = cache[0], cache[1]
    picture = seen["image_mask"].bool()
    assert torch.equal(seen["input_ids"], blank["input_ids"])
    start = int(picture.nonzero()[0])
    for key in ("inputs_embeds", "hidden_states.0", "last_hidden_state"):
        assert torch.equal(seen[key][:start], blank[key][:start]), key
        assert not torch.isclose(seen[key][picture], blank[key][picture]).all(dim=-1).any(), key
    after = slice(int(picture.nonzero()[-1]) + 1, None)
    assert not torch.equal(seen["last_hidden_state"][after], blank["last_hidden_state"][after])
