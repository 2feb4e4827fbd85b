"""Where every byte of a shard lies: a plain safetensors file of fixed-shape tensors.

The layout depends on fields and row count alone, so all offsets are known before the first
forward pass, and padding can stay unwritten (a hole in the file that reads as zeros).
"""

import json
import struct
from collections.abc import Sequence

from dspark.schemas.fields import Field

ALIGNMENT = 4096
_LENGTH_PREFIX = struct.Struct("<Q")


class ShardLayout:
    """The bytes of a shard of ``rows`` rows.

    Attributes:
        fields: the stored fields, in file order.
        rows: S, rows in the shard, the same in every shard of a cache.
        header: the file's first bytes, padded with spaces so that data starts on a 4096 boundary.
        file_size: bytes of the whole file, holes included.
    """

    def __init__(self, fields: Sequence[Field], rows: int) -> None:
        self.fields = tuple(fields)
        self.rows = rows
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._begin: dict[str, int] = {}
        end = 0
        for field in self.fields:
            begin, end = end, end + rows * field.row_bytes
            self._begin[field.name] = begin
            entries[field.name] = {
                "dtype": field.dtype,
                "shape": [rows, *field.row_shape],
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        prefix = _LENGTH_PREFIX.size
        data_start = -(-(prefix + len(text)) // ALIGNMENT) * ALIGNMENT
        self.header = _LENGTH_PREFIX.pack(data_start - prefix) + text.ljust(data_start - prefix)
        self.file_size = data_start + end

    def row_extents(self, field: Field, row: int, length: int) -> list[tuple[int, int]]:
        """(offset in the file, bytes) of the runs with the first ``length`` tokens of ``row``."""
        start = len(self.header) + self._begin[field.name] + row * field.row_bytes
        return [(start + offset, size) for offset, size in field.extents(length)]
