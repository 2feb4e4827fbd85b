"""A file of 200 rows with every kind of bad row in it: the good ones are as if alone."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conversation_data import noise_picture, png

import dspark
from dspark.reports import capture as report
from dspark.schemas.errors import InputError, TooManySkippedError


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def about(picture: Any, *more: dict[str, Any]) -> dict[str, Any]:
    user = [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}, *more]
    return {
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "This."}]
    }


def say(user: Any, assistant: Any = "Yes.") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
    }


def good(number: int) -> dict[str, Any]:
    """Content that is text in one row and a list in the next; none, one or two pictures."""
    if number % 4 == 0:
        return say(f"Say {number}", f"{number}.")
    if number % 4 == 1:
        return about(data_uri(png(noise_picture(number, (32, 64)))))
    if number % 4 == 2:
        return about("here.png", {"type": "image"}) | {"images": ["here.png"]}
    first, second = say("Add", "What?")["messages"], say("1 and 1", "2.")["messages"]
    return {"messages": [{"role": "system", "content": "Brief."}, *first, *second]}


PNG = png(noise_picture(0, (64, 64)))
BAD: list[tuple[Any, str]] = [
    ("{broken", "broken JSON line"),
    ("[1, 2]", "broken JSON line"),
    ({"messages": None}, "missing field"),
    ({"other": 1}, "missing field"),
    (say(None), "missing field"),
    ({"messages": [{"content": "x"}]}, "missing field"),
    ({"messages": []}, "no assistant turn"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "no assistant turn"),
    (say("Hi", ""), "empty assistant turn"),
    (say("Hi", []), "empty assistant turn"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "unknown role"),
    (about("nowhere.png"), "picture missing"),
    (about(None) | {"images": [None]}, "picture missing"),
    (about("empty.png"), "picture empty"),
    (about("cut.png"), "picture truncated"),
    (about(data_uri(b"no picture")), "picture corrupt"),
    (about("data:image/png;base64,???"), "picture corrupt"),
    (about("https://example.com/a.png"), "picture is a web address"),
    (about("bomb.png"), "decompression bomb"),
    (about("here.png") | {"images": ["here.png"]}, "pictures and placeholders do not match"),
    (about(None), "pictures and placeholders do not match"),
    (say([{"type": "video", "video": "a.mp4"}]), "video or audio"),
    (say("Hi") | {"audio": "a.wav"}, "video or audio"),
    (say([{"type": "table"}]), "unknown content part"),
    (say("Hi") | {"tools": "{"}, "broken tools"),
    (say("\ud800"), "broken Unicode"),
    (say("x" * 600), "longer than --max-length"),
    (about(data_uri(png(noise_picture(1, (2000, 4))))), "the processor refuses it"),
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, str], list[int]]:
    """The mixed file, one of its good rows only, the kinds of the bad rows and the good rows."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "here.png").write_bytes(PNG)
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(PNG[: len(PNG) // 2])
    from PIL import Image

    Image.new("1", (10_000, 10_000)).save(folder / "bomb.png")
    order = [*range(len(BAD)), *range(len(BAD)), *range(-1, -200, -1)][:200]
    random.Random(0).shuffle(order)
    lines = [good(-i) if i < 0 else BAD[i][0] for i in order]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "mixed.jsonl").write_text("\n".join(texts))
    good_texts = [t for t, i in zip(texts, order, strict=True) if i < 0]
    (folder / "good.jsonl").write_text("\n".join(good_texts))
    bad = {row: BAD[i][1] for row, i in enumerate(order) if i >= 0}
    return (
        folder / "mixed.jsonl",
        folder / "good.jsonl",
        bad,
        [row for row, i in enumerate(order) if i < 0],
    )


def test_good_rows_are_as_if_alone_and_bad_ones_are_named(
    tiny_target: Callable[[str], Path], mixed: Any, tmp_path: Path
) -> None:
    data, only_good, bad, good_rows = mixed
    # One row a batch: the same numbers whatever lies beside it.
    options = {"target": str(tiny_target("qwen2_5_vl")), "batch_tokens": 1, "max_skipped": 1.0}
    whole = dspark.capture(7, data=str(data), out=str(tmp_path / "mixed"), **options)
    alone = dspark.capture(3, data=str(only_good), out=str(tmp_path / "good"), **options)

    assert alone.skipped == ()
    assert whole.manifest.num_samples == 200
    assert whole.manifest.counts.ok == len(good_rows) == 200 - 2 * len(BAD)
    cache, good_cache = dspark.open_cache(tmp_path / "mixed"), dspark.open_cache(tmp_path / "good")
    for i, row in enumerate(good_rows):
        stored, expected = cache[row], good_cache[i]
        assert stored["input_ids"].numel() > 0
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[k], expected[k]) for k in expected), row

    index = [
        entry
        for path in sorted((tmp_path / "mixed" / "index").glob("*.parquet"))
        for entry in pq.read_table(path).to_pylist()
    ]
    reasons = {e["sample"]: e["reason"] for e in index if e["status"] == "skipped"}
    assert {row: reason.split(":")[0] for row, reason in reasons.items()} == bad

    named = {row: kind.kind for kind in whole.skipped for row in kind.rows}
    assert named == bad
    assert sum(kind.count for kind in whole.skipped) == len(bad)
    summary = report.capture(whole)
    lines = {line.split("  ")[2].strip(): line for line in summary.splitlines()[1:]}
    for row, kind in bad.items():
        assert f" {row}," in lines[kind] or f" {row} " in lines[kind] + " ", summary
    assert f"{len(bad)} skipped" in summary


def test_too_many_skipped_rows_are_an_error_that_leaves_the_cache(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([json.dumps(say("Hi"))] * 8 + ["oops"] * 2))
    options = {
        "target": str(tiny_target("llava")),
        "data": str(data),
        "out": str(tmp_path / "c"),
    }
    with pytest.raises(TooManySkippedError) as error:
        dspark.capture(2, **options)
    sentence, *table = str(error.value).splitlines()
    assert sentence.startswith("2 of 10 rows were skipped, more than --max-skipped 0.1 allows")
    assert len(table) == 1
    assert table[0].strip().startswith("2  broken JSON line  rows 8, 9  (")
    assert dspark.open_cache(tmp_path / "c").manifest.complete
    with pytest.raises(TooManySkippedError):  # it is no better when asked again
        dspark.capture(2, **options)
    assert dspark.capture(2, **options, max_skipped=0.2).shards_written == 0
    with pytest.raises(TooManySkippedError):
        dspark.capture(2, **options, max_skipped=0.19)


def test_on_bad_row_error_stops_at_the_first_and_keeps_what_is_committed(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([json.dumps(say("Hi"))] * 5 + ["oops", "oops"]))
    options = {
        "target": str(tiny_target("llava")),
        "data": str(data),
        "out": str(tmp_path / "c"),
    }
    with pytest.raises(InputError, match=r"d.jsonl: row 5 cannot be captured \(broken JSON line: "):
        dspark.capture(3, **options, on_bad_row="error")
    assert sorted(p.name for p in (tmp_path / "c" / "index").iterdir()) == [
        "shard-00000-of-00003.parquet"
    ]
    assert dspark.capture(3, **options, max_skipped=1).shards_written == 2
    bad = '{"id": "x7", "messages": []}'
    data.write_text("\n".join([json.dumps(say("Hi"))] * 5 + [bad]))
    told = "row 5, id 'x7', cannot .* mend or .* new --out or with --overwrite"
    mended = options | {"out": str(tmp_path / "e")}
    with pytest.raises(InputError, match=told):
        dspark.capture(3, **mended, on_bad_row="error")
    data.write_text("\n".join([json.dumps(say("Hi"))] * 6))
    with pytest.raises(InputError, match="other settings .data: "):
        dspark.capture(3, **mended, on_bad_row="error")
    done = dspark.capture(3, **mended, on_bad_row="error", overwrite=True)
    assert done.shards_written == 3
    with pytest.raises(InputError, match="row 0 cannot be captured"):
        dspark.capture(
            1, **{**options, "out": str(tmp_path / "d"), "max_length": 2}, on_bad_row="error"
        )
