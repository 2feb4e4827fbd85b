"""Whether a Parquet file is plain: neither compressed nor encoded, so that it decodes to its size.

A few bytes of a packed page can declare billions of values, and some damaged footers end the
process inside of pyarrow. So a file is looked at here before pyarrow gets it.
"""

import struct
from typing import Any

from dspark.schemas.thrift_compact import CompactReader

_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")
_UNCOMPRESSED = 0
_DATA_PAGE = 0
_PLAIN = 0
_RLE = 3


def check_plain(data: bytes, rows: int, most_values: int) -> None:
    """Check that a Parquet file has so many rows and is plain.

    Args:
        data: the file.
        rows: that it must have.
        most_values: that a row may have in a column.

    Raises:
        ValueError: it is not so; or it is no Parquet file.
    """
    length, magic = _TAIL.unpack(data[-_TAIL.size :]) if len(data) > 12 else (0, b"")
    start = len(data) - _TAIL.size - length
    if magic != _MAGIC or not data.startswith(_MAGIC) or start < len(_MAGIC):
        raise ValueError("it is no Parquet file")
    try:
        footer = CompactReader(data, start).struct()
        if footer[3] != rows:
            raise ValueError(f"{footer[3]:,} rows for {rows:,} samples")
        groups = [(group[3], column) for group in footer[4] for column in group[1]]
        if any(not 0 <= count <= rows for count, _ in groups):
            raise ValueError("its row groups do not have the rows of the file")
        for count, column in groups:
            _check_column(data, start, column, count * most_values)
    except (KeyError, IndexError, TypeError):
        raise ValueError("its footer lacks something") from None


def _check_column(data: bytes, end: int, column: dict[int, Any], most_values: int) -> None:
    """Check a column chunk of a file whose pages lie before ``end``."""
    if 1 in column:
        raise ValueError("a column lies in another file")
    facts = column[3]  # ColumnMetaData
    encodings, codec, size, at = facts[2], facts[4], facts[7], facts[9]
    if codec != _UNCOMPRESSED or 11 in facts or not {*encodings} <= {_PLAIN, _RLE}:
        raise ValueError("a column is packed")
    if not 0 <= at <= at + size <= end:
        raise ValueError("a column does not lie in the file")
    reader = CompactReader(data, at)
    values = 0
    while reader.at < at + size:
        header = reader.struct()
        page = header[5]  # DataPageHeader
        if header[1] != _DATA_PAGE or page[2] != _PLAIN or header[2] != header[3]:
            raise ValueError("a page is packed")
        if page[1] < 0 or not 0 <= header[3] <= at + size - reader.at:
            raise ValueError("a page does not lie in its column")
        reader.at += header[3]
        values += page[1]
    if values > most_values:
        raise ValueError("a column has more values than fit")
