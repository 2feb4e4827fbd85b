"""Parquet with random access by row."""

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dspark.capture.conversations.arrow_batches import PARQUET
from dspark.capture.conversations.records import COLUMNS, PICTURE_COLUMNS, Record
from dspark.capture.conversations.spool import SpoolCache, first_records, part_batches, record_of
from dspark.capture.file_digest import sampled_digest
from dspark.schemas.errors import InputError

_SMALL_GROUP = 4 << 20


class ParquetRecords:
    """A Parquet file. A small row group is read when one of its rows is wanted; a larger one goes
    through a temporary file (see ``spool``).

    Args:
        path: of the file.
        spools: shared by all files of a dataset.

    Raises:
        InputError: not readable.
    """

    def __init__(self, path: Path, spools: SpoolCache) -> None:
        self._path = path
        self._spools = spools
        try:
            with pq.ParquetFile(path) as file:
                self._names = file.schema_arrow.names
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                self._ends = np.cumsum([0, *(g.num_rows for g in groups)])[1:]
                self._wanted = [name for name in COLUMNS if name in self._names]
                self._bytes = [_bytes(group, self._wanted) for group in groups]
                self._texts = [name for name in self._wanted if name not in PICTURE_COLUMNS]
                self._text_bytes = [_bytes(group, self._texts) for group in groups]
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"--data {path}: not a readable Parquet file ({error})") from None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def columns(self) -> list[str]:
        return list(self._names)

    def read(self, row: int) -> Record:
        group = bisect_right(self._ends, row)
        row -= int(self._ends[group - 1]) if group else 0
        size = self._bytes[group]
        if size <= _SMALL_GROUP:
            return record_of(_small_group(self, group), row)
        return self._spools.read(PARQUET, self._path, group, self._wanted, size, row)

    def head(self, count: int) -> list[Record]:
        return first_records(PARQUET, self._path, self._texts, self._text_bytes, count)

    def fingerprint(self) -> str:
        return sampled_digest(self._path)

    def read_small(self, group: int) -> pa.Table:
        """A whole row group."""
        batches = part_batches(PARQUET, self._path, group, self._wanted, self._bytes[group])
        return pa.Table.from_batches(batches)


def _bytes(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """Uncompressed size of the columns of a row group."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    return sum(
        c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns
    )


@lru_cache(maxsize=8)
def _small_group(records: ParquetRecords, group: int) -> pa.Table:
    return records.read_small(group)
