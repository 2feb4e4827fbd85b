"""The zarr form of a shard: which objects a group has, and where the bytes of a row lie in them.

As in ``shard_layout``, all of it follows from fields, row count and format. So a reader compares
metadata byte for byte with what they must be, and nothing that they say is acted upon.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from dspark.schemas.dtypes import ITEMSIZE
from dspark.schemas.fields import Field
from dspark.schemas.shard_format import ShardFormat

METADATA = "zarr.json"
ENTRY_BYTES = 16
"""Of a chunk in the index at the end of an object: offset and size, both ``<u8``."""

CHECKSUM_BYTES = 4
CHUNK_TOKENS = 128
CHUNK_BYTES = 1 << 20
WHOLE_ROW_BYTES = 1 << 14
"""Most tokens and bytes of a chunk before compression, but for rows so short that they are one.
A part of the format: readers rely on it. What they cost: ``benchmarks/codecs.py``."""

_ZARR_TYPES = {"F16": "float16", "F32": "float32", "I32": "int32", "U8": "uint8"}
"""Of what has none here, the bits are stored as unsigned integers."""

_CRC32C: dict[str, Any] = {"name": "crc32c"}


class ArrayLayout:
    """One field of a shard as a zarr array that is stored as a single object.

    Attributes:
        field: the field.
        rows: S.
        format: of the cache.
        chunk_tokens: tokens of an inner chunk: all T where such a row has at most
            ``WHOLE_ROW_BYTES``, otherwise the largest power of two up to ``CHUNK_TOKENS`` that is
            at most T and ``CHUNK_BYTES``, but at least 1.
        chunks_per_row: inner chunks of a row, padding included.
        runs: pieces of a row that are apart in memory: 1, or the rows of multi-axis positions.
        run_bytes: bytes of a token in one run.
        index_bytes: size of the index at the end of the object, checksum included.
        object: name of the object in the group.
        metadata: name of the array's metadata in the group.
    """

    def __init__(
        self,
        field: Field,
        rows: int,
        form: ShardFormat,
        chunk_tokens: int = CHUNK_TOKENS,
        whole_row_bytes: int = WHOLE_ROW_BYTES,
    ) -> None:
        self.field = field
        self.rows = rows
        self.format = form
        length = field.row_shape[field.token_axis]
        most = min(chunk_tokens, length, max(1, CHUNK_BYTES // field.token_bytes))
        whole = field.row_bytes <= whole_row_bytes
        self.chunk_tokens = length if whole else 1 << most.bit_length() - 1
        self.chunks_per_row = -(-length // self.chunk_tokens)
        self.runs = math.prod(field.row_shape[: field.token_axis])
        self.run_bytes = field.token_bytes // self.runs
        self.index_bytes = rows * self.chunks_per_row * ENTRY_BYTES + CHECKSUM_BYTES
        self.object = f"{field.name}/c" + ".0" * (1 + len(field.row_shape))
        self.metadata = f"{field.name}/{METADATA}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before compression."""
        return self.chunk_tokens * self.field.token_bytes

    def chunks(self, length: int) -> int:
        """Chunks of a row with ``length`` real tokens: its first ones. The others are absent."""
        return -(-length // self.chunk_tokens)

    def document(self) -> dict[str, Any]:
        """The array's metadata."""
        row = list(self.field.row_shape)
        chunk, whole = row.copy(), row.copy()
        chunk[self.field.token_axis] = self.chunk_tokens
        whole[self.field.token_axis] = self.chunk_tokens * self.chunks_per_row
        little: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
        itemsize = ITEMSIZE[self.field.dtype]
        numbers = little if itemsize > 1 else {"name": "bytes"}
        sharding = {
            "chunk_shape": [1, *chunk],
            "codecs": [numbers, *self._compressor(), _CRC32C],
            "index_codecs": [little, _CRC32C],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.rows, *row],
            "data_type": _ZARR_TYPES.get(self.field.dtype, f"uint{8 * itemsize}"),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.rows, *whole]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0.0 if self.field.dtype in ("F16", "F32") else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"dtype": self.field.dtype},
            "storage_transformers": [],
        }

    def _compressor(self) -> list[dict[str, Any]]:
        if self.format.codec == "zstd":
            of_zstd = {"level": self.format.level, "checksum": False}
            return [{"name": "zstd", "configuration": of_zstd}]
        if self.format.codec == "lz4":
            of_blosc = {
                "cname": "lz4",
                "clevel": self.format.level,
                "shuffle": "bitshuffle",
                "typesize": ITEMSIZE[self.field.dtype],
                "blocksize": 0,
            }
            return [{"name": "blosc", "configuration": of_blosc}]
        return []


class ZarrLayout:
    """The objects of a group.

    Args:
        fields: the stored fields.
        rows: S.
        form: of the cache.
        chunk_tokens: most tokens of a chunk; the default is that of the format.
        whole_row_bytes: of a row that is one chunk; likewise.

    Attributes:
        arrays: of each field, in the order of fields.
        documents: the bytes of each ``zarr.json``, by its name in the group.
        objects: names of all objects of the group, in the order of writing, its own metadata last.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        rows: int,
        form: ShardFormat,
        chunk_tokens: int = CHUNK_TOKENS,
        whole_row_bytes: int = WHOLE_ROW_BYTES,
    ) -> None:
        self.arrays = {
            f.name: ArrayLayout(f, rows, form, chunk_tokens, whole_row_bytes) for f in fields
        }
        self.documents = {a.metadata: _json(a.document()) for a in self.arrays.values()}
        group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        self.documents[METADATA] = _json(group)
        names = [name for a in self.arrays.values() for name in (a.object, a.metadata)]
        self.objects = (*names, METADATA)

    def objects_of(self, field: str) -> tuple[str, str]:
        """Names of a field's data and metadata."""
        array = self.arrays[field]
        return array.object, array.metadata


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
