"""A bad row keeps its place, with its reason, and leaves its neighbours alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conversation_data import (
    IMAGE,
    assistant,
    mixed_rows,
    noise_picture,
    row,
    text,
    user,
    write_rows,
)
from tiny_targets import tokenizer

import dspark
from dspark.schemas.errors import InputError

GOOD = [user(text("Hi")), assistant("Yes.")]
PICTURE = [user(IMAGE, text("?")), assistant("A cat.")]


def broken_picture(number: int) -> dict[str, Any]:
    bad = row(number, PICTURE, [noise_picture(1, (32, 32))])
    bad["images"][0]["bytes"] = bad["images"][0]["bytes"][:60]
    return bad


BAD: list[tuple[dict[str, Any], str]] = [
    (row(0, [user(text("x" * 600)), assistant("y")]), "longer than --max-length: 6"),
    (row(0, [user(text("Hi"))]), "no assistant turn"),
    (row(0, [user(text("Hi")), {"role": "assistant", "content": []}]), "empty assistant turn"),
    (
        row(0, [user(text("Hi")), {"role": "robot", "content": [text("a")]}]),
        "unknown role: 'robot'",
    ),
    (row(0, PICTURE), "pictures and placeholders do not match: 0 pictures, 1 image parts"),
    (row(0, GOOD, [noise_picture(1, (32, 32))]), "pictures and placeholders do not match: 1 pict"),
    (broken_picture(0), "picture truncated: picture 0: "),
    (
        row(0, [user({"type": "video", "text": None}), assistant("y")]),
        "video or audio: messages[0]",
    ),
    (
        row(0, [user(text("a <|image_pad|> b")), assistant("y")]),
        "control token in a text: <|image_pad|>",
    ),
    (
        row(0, [user(IMAGE, text("?")), assistant("y")], [noise_picture(1, (2000, 4))]),
        "the processor refuses it: ",
    ),
]


def test_each_kind(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    target = str(tiny_target("qwen2_5_vl"))
    rows: list[dict[str, Any]] = []
    for i, (bad, _) in enumerate(BAD):
        rows += [row(2 * i, GOOD), {**bad, "id": f"row-{2 * i + 1}"}]
    only_good = write_rows(
        tmp_path / "good.parquet", [r for r in rows if r["messages"] == GOOD and not r["images"]]
    )
    data = write_rows(tmp_path / "mixed.parquet", rows)
    report = dspark.capture(
        3,
        target=target,
        data=str(data),
        out=str(tmp_path / "mixed"),
        batch_tokens=1,
        max_skipped=0.5,
    )
    dspark.capture(
        1, target=target, data=str(only_good), out=str(tmp_path / "good"), batch_tokens=1
    )

    assert report.manifest.counts.ok == len(BAD)
    assert sum(report.manifest.counts.skipped.values()) == len(BAD)
    index = [
        entry
        for path in sorted((tmp_path / "mixed" / "index").glob("*.parquet"))
        for entry in pq.read_table(path).to_pylist()
    ]
    assert [e["sample"] for e in index] == list(range(len(rows)))
    assert [e["id"] for e in index] == [r["id"] for r in rows]
    cache, good = dspark.open_cache(tmp_path / "mixed"), dspark.open_cache(tmp_path / "good")
    for i, (_, reason) in enumerate(BAD):
        bad = index[2 * i + 1]
        assert bad["status"] == "skipped"
        assert bad["reason"].startswith(reason)
        assert bad["length"] == 0
        assert all(t.numel() == 0 for t in cache[2 * i + 1].values())
        stored, expected = cache[2 * i], good[i]
        assert all(torch.equal(stored[k], expected[k]) for k in expected)


def test_all_rows_bad_is_an_error(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.parquet", [row(i, [user(text("Hi"))]) for i in range(3)])
    with pytest.raises(InputError, match=r"every row was skipped \(3 x no assistant turn\)"):
        dspark.capture(1, target=str(tiny_target("llava")), data=str(data), out=str(tmp_path / "c"))


def test_non_finite_features_are_skipped(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    """A residual stream beyond fp16's range must not become infinities in the cache."""
    import shutil

    from safetensors.torch import load_file, save_file

    target = tmp_path / "loud"
    shutil.copytree(tiny_target("llava"), target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name][tokenizer()("Q")["input_ids"]] = 1e6
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    rows = [row(0, GOOD), row(1, [user(text("Q")), assistant("Yes.")])]
    data = write_rows(tmp_path / "d.parquet", rows)
    options = {"target": str(target), "data": str(data)}
    half = dspark.capture(1, **options, out=str(tmp_path / "c"), dtype="fp16", max_skipped=0.5)
    assert half.manifest.counts.skipped == {"non-finite features": 1}
    with pytest.raises(InputError, match=r"row 1, id 'row-1', cannot be captured \(non-finite"):
        dspark.capture(1, **options, out=str(tmp_path / "e"), dtype="fp16", on_bad_row="error")
    full = dspark.capture(1, **options, out=str(tmp_path / "d"), dtype="bf16")
    assert full.manifest.counts.skipped == {}


def test_cache_of_mixed_rows_has_no_skips(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(6))
    report = dspark.capture(
        4, target=str(tiny_target("llava")), data=str(data), out=str(tmp_path / "c")
    )
    assert report.manifest.counts.ok == 6
    assert report.manifest.counts.skipped == {}
