"""Shards are plain safetensors files of fixed shape whose padding takes no disk."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dspark.capture.shard_writer import ShardWriter
from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.fields import Field, build_fields
from dspark.schemas.shard_layout import ShardLayout

shapes = st.fixed_dictionaries(
    {
        "max_length": st.integers(1, 9),
        "hidden_size": st.integers(1, 5),
        "vocab_size": st.integers(3, 7),
        "layers": st.lists(st.integers(-1, 3), unique=True, max_size=3),
        "dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
        "logits": st.sampled_from(["full", "head", "topk:2"]),
        "position_rows": st.sampled_from([1, 3, 4]),
    }
)


def random_row(fields: list[Field], length: int, rng: np.random.RandomState) -> dict:
    row = {}
    for field in fields:
        shape = list(field.row_shape)
        shape[field.token_axis] = length
        values = torch.from_numpy(rng.randint(1, 100, shape))
        row[field.name] = values.to(torch_dtype(field.dtype))
    return row


@settings(max_examples=60)
@given(shapes, st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_safetensors_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, shape: dict, rows: int, seed: int
) -> None:
    rng = np.random.RandomState(seed)
    fields = build_fields(**shape)
    path = tmp_path_factory.mktemp("shard") / "s.safetensors"
    lengths = rng.randint(0, shape["max_length"] + 1, rows)
    written = [random_row(fields, int(n), rng) for n in lengths]
    with ShardWriter(path, ShardLayout(fields, rows)) as writer:
        for i in rng.permutation(rows):
            if lengths[i]:
                writer.write_row(int(i), written[i])
        writer.commit()

    with safe_open(path, "pt") as f:
        assert list(f.keys()) == sorted(field.name for field in fields)
        for field in fields:
            stored = f.get_tensor(field.name)
            assert stored.shape == (rows, *field.row_shape)
            expected = torch.zeros_like(stored)
            for i, n in enumerate(lengths):
                part = expected[i].narrow(field.token_axis, 0, int(n))
                part.copy_(written[i][field.name])
            assert torch.equal(stored, expected), field.name


def test_data_starts_on_a_disk_block() -> None:
    for rows in range(1, 40):
        layout = ShardLayout([Field("x" * rows, "BF16", (rows, 3))], rows)
        assert len(layout.header) % 4096 == 0


def test_padding_takes_no_disk(tmp_path: Path) -> None:
    """A quarter of a shard of realistic width is real: disk within 2 % of it."""
    probe = tmp_path / "holes"
    with open(probe, "wb") as f:
        f.truncate(1 << 20)
    if os.stat(probe).st_blocks * 512 >= 1 << 20:
        pytest.skip("this file system has no holes")
    fields = build_fields(
        max_length=1024,
        hidden_size=1536,
        vocab_size=100,
        layers=[1, 2],
        dtype="bf16",
        logits="head",
        position_rows=3,
    )
    rng = np.random.RandomState(0)
    lengths = rng.randint(100, 400, 16)
    path = tmp_path / "s.safetensors"
    layout = ShardLayout(fields, len(lengths))
    with ShardWriter(path, layout) as writer:
        for i, n in enumerate(lengths):
            writer.write_row(i, random_row(fields, int(n), rng))
        writer.commit()
    real = sum(f.token_bytes for f in fields) * int(lengths.sum())
    stat = path.stat()
    assert stat.st_size == layout.file_size > 3 * real
    assert abs(stat.st_blocks * 512 - real) < 0.02 * real
