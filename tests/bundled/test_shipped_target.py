"""What ``bundled/`` ships is what its README says."""

import os
import random
import stat
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from dspark.bundled import HELDOUT_DATA, TARGET, TRAIN_DATA
from dspark.bundled.recipe.conversations import draw_one
from dspark.bundled.recipe.pictures import blank, scans
from dspark.capture.conversations import open_conversations


@pytest.fixture(scope="module")
def target() -> tuple:
    model = AutoModelForImageTextToText.from_pretrained(TARGET).eval()
    return model, AutoProcessor.from_pretrained(TARGET)


def test_small_enough_to_ship() -> None:
    path = TARGET / "model.safetensors"
    assert path.stat().st_size <= 6e6
    assert sum(t.numel() for t in load_file(path).values()) <= 4e6
    for file in TARGET.iterdir():
        assert stat.S_IMODE(os.stat(file).st_mode) & 0o444 == 0o444, file


@torch.inference_mode()
def greedy(target: tuple, messages: list, new_tokens: int = 60) -> str:
    model, processor = target
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    return processor.tokenizer.decode(ids).removesuffix("<|im_end|>")


def test_it_reads_held_out_digits_and_not_blank_pictures(target: tuple) -> None:
    """A quick look at 60 prompts; the README has the full table."""
    rng = random.Random(7)
    right = guessed = 0
    for _ in range(60):
        while True:
            conversation = draw_one(rng, scans("heldout"), 1)
            if conversation.turns[0].question.kind == "read":
                break
        question = conversation.turns[0].question
        for control in (False, True):
            picture = conversation.pictures[0]
            image = blank(picture).image if control else picture.image
            part = {"type": "image", "image": image}
            messages = conversation.messages([])
            messages[-1]["content"][0] = part
            same = greedy(target, messages) == question.answer
            right += same and not control
            guessed += same and control
    assert right >= 54, right
    assert guessed <= 9, guessed


@pytest.mark.parametrize(("path", "rows"), [(TRAIN_DATA, 1500), (HELDOUT_DATA, 300)])
def test_conversations(path: Path, rows: int) -> None:
    table = pq.read_table(path).to_pylist()
    assert len(table) == rows
    assert len({r["id"] for r in table}) == rows
    pictures = [len(r["images"]) for r in table]
    assert 0.25 < pictures.count(0) / rows < 0.42
    assert pictures.count(2) > rows / 10
    turns = [sum(m["role"] == "assistant" for m in r["messages"]) for r in table]
    assert set(turns) == {1, 2, 3}
    conversations = open_conversations(path)
    sizes = {
        part["image"].size
        for row in range(60)
        for message in conversations.read(row).messages
        for part in message["content"]
        if part["type"] == "image"
    }
    assert len(sizes) >= 5


def test_splits_share_no_digit() -> None:
    seen = [
        {image.tobytes() for image in scans(split).images}
        for split in ("train", "validation", "heldout")
    ]
    assert [len(s) for s in seen] == [1347, 150, 300]
    assert len(set.union(*seen)) == 1797


def test_answers_are_the_targets_own(target: tuple) -> None:
    conversations = open_conversations(TRAIN_DATA)
    for row in range(12):
        messages = conversations.read(row).messages
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                stored = message["content"][0]["text"]
                assert greedy(target, messages[:i]) == stored, (row, i)
