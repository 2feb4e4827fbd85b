"""``--overlong truncate`` cuts text after the last picture, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conversation_data import IMAGE, assistant, noise_picture, row, text, user, write_rows

import dspark
from dspark.capture.conversations import open_conversations
from dspark.capture.rendering.batch_inputs import batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.settings import RowOptions
from dspark.capture.targets.loading import load_target

T = 64
PICTURE = noise_picture(3, (64, 64))  # 16 positions in all families here
LONG = "and so on " * 8
ROWS = [
    row(0, [user(IMAGE, text("?")), assistant(LONG)], [PICTURE]),
    row(1, [user(text("Hi")), assistant("No."), user(text("x")), assistant(LONG)]),
    row(2, [user(text("Hi")), assistant("Yes.")]),
    row(3, [user(text("Hi")), assistant("A."), user(text(LONG), IMAGE), assistant("B")], [PICTURE]),
    row(4, [user(text(LONG)), assistant("C.")]),
    row(5, [user(IMAGE, text("?")), assistant("Short.")], [PICTURE]),
]


def capture(target: Path, data: Path, out: Path, **options: Any) -> Any:
    dspark.capture(
        1,
        target=str(target),
        data=str(data),
        out=str(out),
        dtype="fp32",
        max_skipped=1.0,
        **options,
    )
    return dspark.open_cache(out)


@pytest.mark.parametrize("fake_image", ["never", "always"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_truncated_rows_are_the_beginning_of_the_whole(
    tiny_target: Callable[[str], Path], tmp_path: Path, family: str, fake_image: str
) -> None:
    data = write_rows(tmp_path / "d.parquet", ROWS)
    target = tiny_target(family)
    whole = capture(target, data, tmp_path / "whole", max_length=256)
    options = {"max_length": T, "overlong": "truncate", "fake_image": fake_image}
    cut = capture(target, data, tmp_path / "cut", **options)
    for sample, length in [(0, T), (1, T), (2, None), (5, None)]:
        for key, value in cut[sample].items():
            axis = 1 if key == "position_ids" and value.ndim == 2 else 0
            expected = whole[sample][key]
            if length is not None:
                assert expected.shape[axis] > T and value.shape[axis] == T
                expected = expected.narrow(axis, 0, T)
            if value.is_floating_point():
                # 1e-5: the noise of another batch shape, in values of size 1.
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(value, expected), (sample, key)

    index = pq.read_table(next((tmp_path / "cut" / "index").glob("*.parquet"))).to_pylist()
    assert index[3]["reason"].startswith("longer than --max-length: ")
    assert "its last picture ends at token" in index[3]["reason"]
    assert index[4]["reason"] == f"no supervised token: left within --max-length {T}"


def test_nothing_is_computed_beyond_the_cut(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    conversations = open_conversations(write_rows(tmp_path / "d.parquet", ROWS))
    target = load_target(str(tiny_target("qwen2_5_vl")), torch.device("cpu"))
    options = RowOptions(overlong="truncate")
    rows = [encode_row(i, conversations, target, T, options) for i in (0, 1, 2)]
    encoded = [r for r in rows if isinstance(r, EncodedRow)]
    assert [len(r) for r in encoded] == [T, T, len(encoded[2])]
    (inputs,) = batch_inputs(encoded, conversations, target, fake_image=False)
    assert inputs.tensors["input_ids"].shape == (3, T)
    assert inputs.tensors["attention_mask"].sum(1).tolist() == [T, T, len(encoded[2])]
    assert inputs.tensors["mm_token_type_ids"].shape == (3, T)
    assert inputs.tensors["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_a_picture_is_kept_with_what_closes_it(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """The cut may fall right after ``<|vision_end|>``, not between it and the picture."""
    messages = [user(text("Hi")), assistant("A."), user(IMAGE, text(LONG)), assistant("B")]
    conversations = open_conversations(
        write_rows(tmp_path / "d.parquet", [row(0, messages, [PICTURE])])
    )
    target = load_target(str(tiny_target("qwen2_5_vl")), torch.device("cpu"))
    options = RowOptions(overlong="truncate")
    whole = encode_row(0, conversations, target, 512, options)
    assert isinstance(whole, EncodedRow)
    (inputs,) = batch_inputs([whole], conversations, target, fake_image=False)
    closed = int((inputs.tensors["input_ids"][0] == target.image_token_id).nonzero()[-1]) + 2
    kept = encode_row(0, conversations, target, closed, options)
    assert isinstance(kept, EncodedRow) and len(kept) == closed
    assert not isinstance(encode_row(0, conversations, target, closed - 1, options), EncodedRow)
