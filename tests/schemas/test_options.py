"""Options have the types that their fields say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark
from dspark.capture.options import CaptureOptions
from dspark.schemas.errors import InputError
from dspark.schemas.options import checked


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layers", [0, 1], r"--layers \[0, 1\]: must be text"),
        ("shards", "2", "--shards '2': must be a whole number"),
        ("shards", True, "--shards True: must be a whole number"),
        ("batch_tokens", "9", "--batch-tokens '9': must be a whole number"),
        ("overlong", "cut", "--overlong cut: choose skip or truncate"),
        ("limit", 2.5, "--limit 2.5: must be a whole number"),
        ("max_skipped", "0.1", "--max-skipped '0.1': must be a number"),
        ("fsdp", 1, "--fsdp 1: must be True or False"),
        ("dtype", [], r"--dtype \[\]: choose bf16 or fp16 or fp32"),
        ("out", "", "--out is empty"),
        ("target", 7, "--target 7: must be text"),
    ],
)
def test_other_types_are_one_sentence(name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}"):
        checked(replace(CaptureOptions(2), **{name: value}))
    with pytest.raises(dspark.InputError, match=f"^{words}"):
        dspark.capture(**({"shards": 2} | {name: value}))


def test_what_is_only_left_out_with_extend() -> None:
    assert checked(CaptureOptions()).shards is None
    with pytest.raises(InputError, match="^--shards: say into how many"):
        dspark.capture()
    options: dict[str, Any]
    for options, words in (
        ({"out": ""}, "--out is empty"),
        ({"shards": "2"}, "--shards '2': must be a whole number"),
        ({"layers": [0]}, r"--layers \[0\]: must be text"),
    ):
        with pytest.raises(InputError, match=f"^{words}"):
            dspark.capture(extend=True, **options)
    with pytest.raises(InputError, match="^--extend 1: must be True or False"):
        dspark.capture(2, extend=1)  # type: ignore[arg-type]


def test_paths_and_the_numbers_of_numpy_are_taken() -> None:
    options: Any = {"shards": np.int64(3), "out": Path("c"), "max_skipped": np.float32(0.5)}
    found = checked(CaptureOptions(**options))
    assert found == CaptureOptions(3, out="c", max_skipped=0.5)
    assert type(found.shards) is int
    assert type(found.max_skipped) is float
    assert checked(CaptureOptions(2, max_skipped=0)) == CaptureOptions(2, max_skipped=0.0)


def test_the_public_names() -> None:
    assert {"capture", "open_cache", "InputError", "Cache"} <= set(dir(dspark))
    assert not [name for name in dir(dspark) if not hasattr(dspark, name)]
    assert "import_module" not in dir(dspark)
