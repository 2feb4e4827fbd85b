"""Datasets of Hugging Face's library: saved to disk, or by id."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation_data import noise_picture

from dspark.capture.conversations import open_conversations
from dspark.schemas.errors import InputError

ROWS = [
    {
        "id": i,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "text": None}, {"type": "text", "text": f"q{i}"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ],
        "images": [noise_picture(i, (4, 4))],
        "embedding": [0.5],
    }
    for i in range(5)
]


@pytest.fixture
def dataset() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    return rows.cast_column("images", datasets.Sequence(datasets.Image()))


def test_saved_to_disk(dataset: Any, tmp_path: Path) -> None:
    dataset.save_to_disk(tmp_path / "whole")
    dataset.select([3, 1]).save_to_disk(tmp_path / "some")
    for name, expected in (("whole", range(5)), ("some", (3, 1))):
        conversations = open_conversations(tmp_path / name)
        assert len(conversations) == len(expected)
        for row, number in enumerate(expected):
            read = conversations.read(row)
            picture, question = read.messages[0]["content"]
            assert read.id == str(number)
            assert question["text"] == f"q{number}"
            assert (np.asarray(picture["image"]) == np.asarray(ROWS[number]["images"][0])).all()


def test_splits(dataset: Any, tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "both"
    datasets.DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk(folder)
    assert open_conversations(Path(f"{folder}:test")).read(0).id == "2"
    for name in (str(folder), f"{folder}:other"):
        with pytest.raises(InputError, match="name one of its splits, train, test, e.g. --data"):
            open_conversations(Path(name))
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "one")
    assert len(open_conversations(tmp_path / "one")) == 5
    with pytest.raises(InputError, match="nobody/nothing: the dataset cannot be loaded"):
        open_conversations(Path("nobody/nothing"))


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text("{}")
    for data in (tmp_path, Path("somebody/conversations"), Path("somebody/conversations:train")):
        with pytest.raises(InputError, match=r"pip install dspark\[datasets\]"):
            open_conversations(data)
    with pytest.raises(InputError, match=r"somebody/train.jsonl: no such file$"):
        open_conversations(Path("somebody/train.jsonl"))
