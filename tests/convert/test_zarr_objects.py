"""The objects of a zarr group against the zarr library: it reads ours, and we read its own."""

import warnings
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from flipped_bytes import xor_byte
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dspark.schemas.copy_shard import DamagedRowError, write_safetensors, write_zarr
from dspark.schemas.digest import field_digest
from dspark.schemas.dtypes import ITEMSIZE
from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.safetensors_shard import SafetensorsShard
from dspark.schemas.shard_format import LEVELS, ShardFormat
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes
from dspark.schemas.zarr_codec import checksum
from dspark.schemas.zarr_layout import ZarrLayout
from dspark.schemas.zarr_shard import ZarrArray, ZarrShard

CODECS = list(LEVELS)
BITS = {"BF16": "u2", "F16": "u2", "F32": "u4", "I32": "i4", "U8": "u1"}


class Shard:
    """A safetensors shard of random bits, its padding holes, and what is in it."""

    def __init__(
        self, folder: Path, fields: Sequence[Field], rows: int, lengths: Sequence[int], seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.fields, self.rows, self.lengths = fields, rows, lengths
        self.layout = ShardLayout(fields, rows)
        self.path = folder / "shard.safetensors"
        self.part: Any = SimpleNamespace(fields=fields)
        self.entries: list[RowBytes] = []
        self.arrays = {f.name: np.zeros((rows, *f.row_shape), BITS[f.dtype]) for f in fields}
        with open(self.path, "wb") as file:
            file.write(self.layout.header)
            file.truncate(self.layout.file_size)
            for row, length in enumerate(lengths):
                digests = []
                for field in fields:
                    real = [slice(None)] * len(field.row_shape)
                    real[field.token_axis] = slice(0, length)
                    view = self.arrays[field.name][row][tuple(real)]
                    # Few different numbers, so that compression has something to do.
                    view[...] = rng.integers(0, 7, view.shape)
                    data, start = view.tobytes(), 0
                    for offset, size in self.layout.row_extents(field, row, length):
                        file.seek(offset)
                        file.write(data[start : start + size])
                        start += size
                    digests.append(field_digest(data))
                if length:
                    self.entries.append(RowBytes(100 + row, row, length, digests))

    def write_group(self, folder: Path, layout: ZarrLayout) -> None:
        with SafetensorsShard(self.path, self.layout) as shard:
            write_zarr(folder, layout, shard, self.part, self.entries)


def field(name: str, dtype: str, length: int, width: int) -> Field:
    """A field of each shape: ``[T]``, ``[T, width]``, and three rows of positions."""
    if name == "position_ids":
        return Field(name, dtype, (3, length), 1)
    return Field(name, dtype, (length, width) if width else (length,))


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[Field], int, list[int], int]:
    length = draw(st.integers(1, 20))
    fields = [
        field(f"f{i}", draw(st.sampled_from([*BITS])), length, draw(st.integers(0, 5)))
        for i in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        fields.append(field("position_ids", "I32", length, 0))
    rows = draw(st.integers(1, 5))
    lengths = [draw(st.integers(0, length)) for _ in range(rows)]
    return fields, rows, lengths, draw(st.integers(0, 2**31))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards(), st.sampled_from(CODECS), st.integers(1, 9))
def test_any_shard(
    tmp_path: Path, shard: tuple[list[Field], int, list[int], int], codec: str, chunk: int
) -> None:
    """zarr reads what safetensors reads; absent is what is padding alone; and the way back."""
    made = Shard(tmp_path, *shard)
    layout = ZarrLayout(made.fields, made.rows, ShardFormat.zarr(codec), chunk, 0)
    made.write_group(tmp_path / "g", layout)
    group = zarr.open_group(tmp_path / "g", mode="r")
    assert {*group.array_keys()} == {f.name for f in made.fields}
    with safe_open(made.path, "np") as file:
        names = {*file.keys()}
    assert names == {f.name for f in made.fields}
    files = {str(p.relative_to(tmp_path / "g")) for p in (tmp_path / "g").rglob("*.*")}
    assert files >= {*layout.objects}
    for f in made.fields:
        array = group[f.name]
        assert isinstance(array, zarr.Array)
        assert array.shape == (made.rows, *f.row_shape)
        assert array.attrs["dtype"] == f.dtype
        found = np.asarray(array[...]).view(BITS[f.dtype])
        assert np.array_equal(found, made.arrays[f.name])
        opened = ZarrArray(tmp_path / "g", layout, f.name)
        opened.check_chunks(np.array(made.lengths))
        tokens = opened.layout.chunk_tokens
        assert tokens == 1 << min(chunk, f.row_shape[f.token_axis]).bit_length() - 1
        there = sum(-(-length // tokens) for length in made.lengths)
        data = (tmp_path / "g" / opened.layout.object).read_bytes()
        index = np.frombuffer(data[-opened.layout.index_bytes : -4], "<u8").reshape(-1, 2)
        assert (index[:, 0] != 2**64 - 1).sum() == there
        opened.close()
    back = tmp_path / "back"
    with ZarrShard(tmp_path / "g", layout) as group_read, FileIO(back, "w") as file_back:
        write_safetensors(file_back, made.layout, group_read, made.part, made.entries)
    assert back.read_bytes() == made.path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_what_zarr_writes_with_these_metadata_is_read(tmp_path: Path, codec: str) -> None:
    """Chunks in zarr's own order, and empty ones left out as zarr does it."""
    fields = [field("wide", "F32", 20, 4), field("position_ids", "I32", 20, 0)]
    made = Shard(tmp_path, fields, 4, [20, 7, 16, 1], 3)
    layout = ZarrLayout(fields, 4, ShardFormat.zarr(codec), 8, 0)
    folder = tmp_path / "g"
    made.write_group(folder, layout)
    for f in fields:
        (folder / layout.arrays[f.name].object).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(folder, mode="r+")
        for f in fields:
            array = group[f.name]
            assert isinstance(array, zarr.Array)
            array[...] = made.arrays[f.name].view("f4" if f.dtype == "F32" else "i4")
    with ZarrShard(folder, layout) as shard, FileIO(tmp_path / "back", "w") as file:
        write_safetensors(file, made.layout, shard, made.part, made.entries)
    assert (tmp_path / "back").read_bytes() == made.path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_each_flipped_byte_of_an_object_is_named(tmp_path: Path, codec: str) -> None:
    """With the digests and without: the checksums of chunks and index find it alone."""
    fields = [field("wide", "BF16", 12, 5)]
    made = Shard(tmp_path, fields, 3, [12, 0, 5], 1)
    layout = ZarrLayout(fields, 3, ShardFormat.zarr(codec), 4, 0)
    folder = tmp_path / "g"
    made.write_group(folder, layout)
    path = folder / layout.arrays["wide"].object
    for offset in range(path.stat().st_size):
        xor_byte(path, offset, 1 << offset % 8)
        with pytest.raises((DamagedError, DamagedRowError)) as found:
            shard = ZarrShard(folder, layout)
            for row in made.entries:
                size = row.length * fields[0].token_bytes
                shard.read_into(fields[0], row.row, row.length, [memoryview(bytearray(size))])
        assert found.value.path == path
        shard.close()
        xor_byte(path, offset, 1 << offset % 8)


@pytest.mark.parametrize("codec", CODECS)
def test_each_cut_of_an_object_is_found(tmp_path: Path, codec: str) -> None:
    fields = [field("wide", "F16", 12, 5)]
    made = Shard(tmp_path, fields, 3, [12, 0, 5], 1)
    layout = ZarrLayout(fields, 3, ShardFormat.zarr(codec), 4, 0)
    made.write_group(tmp_path / "g", layout)
    path = tmp_path / "g" / layout.arrays["wide"].object
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedError, match="index"):
            ZarrArray(tmp_path / "g", layout, "wide")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_forged_chunk_does_not_decode_to_another_size(tmp_path: Path, codec: str) -> None:
    """Right checksums around a chunk of fewer or more tokens."""
    fields = [field("wide", "I32", 8, 4)]
    made = Shard(tmp_path, fields, 1, [8], 1)
    form = ShardFormat.zarr(codec)
    layout = ZarrLayout(fields, 1, form)
    for tokens in (4, 16):
        other = Shard(tmp_path, [field("wide", "I32", tokens, 4)], 1, [tokens], 1)
        other.write_group(tmp_path / "g", ZarrLayout(other.fields, 1, form))
        for name, document in layout.documents.items():
            (tmp_path / "g" / name).write_bytes(document)
        with ZarrShard(tmp_path / "g", layout) as shard:
            out = [memoryview(bytearray(8 * fields[0].token_bytes))]
            with pytest.raises(DamagedError, match="it has another size|cannot be decoded"):
                shard.read_into(made.fields[0], 0, 8, out)


@pytest.mark.parametrize(
    "offset, size",
    [(0, 2**63), (2**63, 8), (2**64 - 1, 8), (0, 0), (1, 60), (10**6, 10), (0, 2**64 - 1)],
)
def test_a_forged_index_leads_nowhere(tmp_path: Path, offset: int, size: int) -> None:
    """With its right checksum: nothing is allocated for what is not there."""
    fields = [field("wide", "F32", 8, 4)]
    made = Shard(tmp_path, fields, 1, [8], 1)
    layout = ZarrLayout(fields, 1, ShardFormat.zarr("none"))
    made.write_group(tmp_path / "g", layout)
    path = tmp_path / "g" / layout.arrays["wide"].object
    packed = np.array([offset, size], "<u8").tobytes()
    path.write_bytes(path.read_bytes()[: -layout.arrays["wide"].index_bytes])
    with open(path, "ab") as file:
        file.write(packed + checksum(packed))
    array = ZarrArray(tmp_path / "g", layout, "wide")
    with pytest.raises(DamagedError):
        array.read_into(0, 8, [memoryview(bytearray(128))])
    with pytest.raises(DamagedError):
        array.check_chunks(np.array([8]))


def test_other_metadata_are_refused(tmp_path: Path) -> None:
    fields = [field("wide", "F16", 12, 5)]
    made = Shard(tmp_path, fields, 1, [12], 1)
    layout = ZarrLayout(fields, 1, ShardFormat.zarr())
    made.write_group(tmp_path / "g", layout)
    for name in ("zarr.json", "wide/zarr.json"):
        path = tmp_path / "g" / name
        kept = path.read_bytes()
        path.write_bytes(kept + b" ")
        with pytest.raises(DamagedError, match="metadata") as found:
            ZarrArray(tmp_path / "g", layout, "wide")
        assert found.value.path == path
        path.unlink()
        with pytest.raises(FileNotFoundError):
            ZarrArray(tmp_path / "g", layout, "wide")
        path.write_bytes(kept)
    ZarrArray(tmp_path / "g", layout, "wide").close()


def test_a_row_that_is_not_what_was_captured_is_not_written(tmp_path: Path) -> None:
    fields = [field("wide", "F16", 12, 5)]
    made = Shard(tmp_path, fields, 2, [12, 3], 1)
    offset, _ = made.layout.row_extents(fields[0], 1, 3)[0]
    xor_byte(made.path, offset, 1)
    with pytest.raises(DamagedRowError, match="wide of dataset row 101 is damaged"):
        made.write_group(tmp_path / "g", ZarrLayout(fields, 2, ShardFormat.zarr()))
    assert not (tmp_path / "g" / "zarr.json").exists()


@pytest.mark.parametrize(
    "dtype, width, tokens",
    [("BF16", 1536, 128), ("BF16", 3584, 128), ("F32", 151_936, 1), ("I32", 0, 2048)],
)
def test_chunks_are_rows_of_some_hundred_tokens(dtype: str, width: int, tokens: int) -> None:
    """Fewer of full logits; and whole rows of ids and masks."""
    f = field("f", dtype, 2048, width)
    assert f.token_bytes == max(1, width) * ITEMSIZE[dtype]
    assert ZarrLayout([f], 10, ShardFormat.zarr()).arrays["f"].chunk_tokens == tokens
    assert ZarrLayout([f], 10, ShardFormat.zarr()).arrays["f"].chunk_bytes <= 1 << 20
