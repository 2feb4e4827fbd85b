"""The stored rows of a shard, read and compared with what the index says of them."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO

import numpy as np
import pyarrow.compute as pc
import xxhash

from dspark.schemas.fields import Field
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.verify.faults import Fault, reading_fault
from dspark.verify.tokens import TOKEN_FIELDS, token_problems
from dspark.verify.values import value_problem

_PIECE = 1 << 18
"""Bytes of a read: what was read is still in the processor's cache when it is looked at."""

_NUMPY = {"I32": "<i4", "U8": "u1"}


@dataclass(frozen=True)
class StoredRow:
    """What the index says of a stored row.

    Attributes:
        sample: dataset row.
        row: row of the shard.
        length: real tokens.
        image_tokens: positions filled by pictures.
        loss_tokens: supervised positions.
        digests: of each field, in the manifest's order.
    """

    sample: int
    row: int
    length: int
    image_tokens: int
    loss_tokens: int
    digests: list[int]


def stored_rows(paths: CachePaths, manifest: Manifest, shard: int) -> list[StoredRow]:
    """The rows of a committed shard that hold a sample.

    Raises:
        IncompatibleCacheError: its index is damaged, gone or not readable.
    """
    table, _ = read_index(paths, manifest, shard)
    columns = list(StoredRow.__dataclass_fields__)
    ok = table.filter(pc.equal(table["status"], OK)).select(columns)
    return [StoredRow(**entry) for entry in ok.to_pylist()]


class _DamagedError(Exception):
    """A field of a row is not as it was written; the message says how."""


class ShardRows:
    """The rows of one part of a shard. Its methods may run in several threads at once.

    Attributes:
        token_fields: ids, positions and masks, each with its place among the fields; empty in an
            extension.
        wide_fields: the others.
    """

    def __init__(self, shard: int, paths: CachePaths, manifest: Manifest) -> None:
        self._shard = shard
        self._part = paths.part
        self._path = paths.shard(shard)
        self._name = str(self._path.relative_to(paths.root))
        self._manifest = manifest
        self._layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
        places = list(enumerate(manifest.fields))
        self.token_fields = [(i, f) for i, f in places if f.name in TOKEN_FIELDS]
        self.wide_fields = [(i, f) for i, f in places if f.name not in TOKEN_FIELDS]

    def checked(self, check: Callable[[FileIO], Iterator[Fault]]) -> list[Fault]:
        """What ``check`` finds in the shard's file, as far as that can be read."""
        faults: list[Fault] = []
        try:
            with FileIO(self._path) as file:
                for fault in check(file):  # what was found before an error counts
                    faults.append(fault)
        except OSError as error:
            faults.append(reading_fault(error, self._name, self._shard, self._part))
        return faults

    def wide(
        self, place: int, field: Field, rows: Iterable[StoredRow], file: FileIO
    ) -> Iterator[Fault]:
        """Digest and values of one wide field of some rows."""
        buffer = np.empty(_PIECE, np.uint8)
        for row in rows:
            problem = None
            try:
                for piece in self._read(file, place, field, row, buffer):
                    problem = problem or value_problem(field, piece, self._manifest)
            except _DamagedError as error:
                problem = str(error)
            if problem is not None:
                yield self._fault(row, field.name, problem)

    def tokens(self, rows: Iterable[StoredRow], file: FileIO) -> Iterator[Fault]:
        """Digests of ids, positions and masks of some rows, and whether they fit each other."""
        buffer = np.empty(_PIECE, np.uint8)
        for row in rows:
            stored: dict[str, np.ndarray] = {}
            for place, field in self.token_fields:
                try:
                    data = b"".join(map(bytes, self._read(file, place, field, row, buffer)))
                    stored[field.name] = np.frombuffer(data, _NUMPY[field.dtype])
                except _DamagedError as error:
                    yield self._fault(row, field.name, str(error))
            if len(stored) == len(self.token_fields):
                found = token_problems(stored, self._manifest, row.image_tokens, row.loss_tokens)
                yield from (self._fault(row, name, problem) for name, problem in found)

    def _read(
        self, file: FileIO, place: int, field: Field, row: StoredRow, buffer: np.ndarray
    ) -> Iterator[memoryview]:
        """The real bytes of a field of a row in pieces, each valid until the next.

        Raises:
            _DamagedError: the file ends before them, or, at the end, they are not what was written.
            OSError: they cannot be read.
        """
        state = xxhash.xxh3_64()
        for offset, size in self._layout.row_extents(field, row.row, row.length):
            for start in range(0, size, buffer.size):
                piece = buffer[: min(buffer.size, size - start)].data
                _fill(file, piece, offset + start)
                state.update(piece)
                yield piece
        if state.intdigest() != row.digests[place]:
            raise _DamagedError("its bytes are not those that were captured")

    def _fault(self, row: StoredRow, field: str, problem: str) -> Fault:
        return Fault(self._name, problem, self._shard, row.sample, field, self._part)


def _fill(file: FileIO, out: memoryview, offset: int) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(file.fileno(), [out[done:]], offset + done)
        if count == 0:
            raise _DamagedError("the file ends before it")
        done += count
