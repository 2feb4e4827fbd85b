"""Rows are run on the tokens that their masks were made for, together or alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation_data import mixed_rows, write_rows

import dspark
from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering import batch_inputs
from dspark.capture.rendering.encode import Encoded, encode_batch
from dspark.schemas.errors import InputError


def in_company(messages: Any, processor: Any, tools: Any, **options: Any) -> Encoded:
    """A processor that begins rows with another token when there are several."""
    encoded = encode_batch(messages, processor, tools, **options)
    if len(messages) > 1:
        encoded.tensors["input_ids"][:, 0] += 1
    return encoded


def refusing_company(messages: Any, processor: Any, tools: Any, **options: Any) -> Encoded:
    """A processor that takes one row at a time."""
    if len(messages) > 1:
        raise BadRowError("the processor refuses it", "one at a time")
    return encode_batch(messages, processor, tools, **options)


@pytest.mark.parametrize("encoder", [in_company, refusing_company])
def test_rows_that_are_encoded_differently_in_company_run_alone(
    tiny_target: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoder: Any,
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(4))
    options: dict[str, Any] = {"target": str(tiny_target("qwen2_5_vl")), "data": str(data)}
    dspark.capture(1, out=str(tmp_path / "one"), batch_tokens=1, **options)
    monkeypatch.setattr(batch_inputs, "encode_batch", encoder)
    dspark.capture(1, out=str(tmp_path / "several"), **options)
    alone, several = dspark.open_cache(tmp_path / "one"), dspark.open_cache(tmp_path / "several")
    for sample in range(4):
        for key, value in alone[sample].items():
            assert torch.equal(several[sample][key], value), key


def test_a_processor_that_is_not_deterministic(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(messages: Any, processor: Any, tools: Any, **options: Any) -> Encoded:
        encoded = encode_batch(messages, processor, tools, **options)
        encoded.tensors["input_ids"][:, 0] += 1
        return encoded

    data = write_rows(tmp_path / "d.parquet", mixed_rows(4))
    monkeypatch.setattr(batch_inputs, "encode_batch", another)
    with pytest.raises(InputError, match=r"row \d could be encoded once but not again"):
        dspark.capture(1, target=str(tiny_target("llava")), data=str(data), out=str(tmp_path / "c"))
