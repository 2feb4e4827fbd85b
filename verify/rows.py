"""The stored rows of a shard, read and compared with what the index says of them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from dspark.schemas.errors import DamagedError
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.stored_rows import StoredRow
from dspark.schemas.stored_shard import StoredShard, open_shard, shard_place, zarr_layout
from dspark.verify.faults import Fault, reading_fault
from dspark.verify.tokens import TOKEN_FIELDS, token_problems
from dspark.verify.values import value_problem

_NUMPY = {"I32": "<i4", "U8": "u1"}


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
        self._paths = paths
        self._place = shard_place(paths, manifest, shard)
        self._manifest = manifest
        places = list(enumerate(manifest.fields))
        self.token_fields = [(i, f) for i, f in places if f.name in TOKEN_FIELDS]
        self.wide_fields = [(i, f) for i, f in places if f.name not in TOKEN_FIELDS]

    def checked(self, check: Callable[[StoredShard], Iterator[Fault]]) -> list[Fault]:
        """What ``check`` finds in the shard, as far as that can be read."""
        faults: list[Fault] = []
        try:
            with open_shard(self._paths, self._manifest, self._shard) as shard:
                for fault in check(shard):  # what was found before an error counts
                    faults.append(fault)
        except DamagedError as error:
            name = self._name(error.path)
            faults.append(Fault(name, error.problem, self._shard, part=self._part))
        except OSError as error:
            name = self._name(Path(error.filename or self._place))
            faults.append(reading_fault(error, name, self._shard, self._part))
        return faults

    def wide(
        self, place: int, field: Field, rows: Iterable[StoredRow], shard: StoredShard
    ) -> Iterator[Fault]:
        """Digest and values of one wide field of some rows."""
        for row in rows:
            problem = None
            try:
                for piece in self._read(shard, place, field, row):
                    problem = problem or value_problem(field, piece, self._manifest)
            except DamagedError as error:
                yield self._fault(row, field, error.problem)
                continue
            if problem is not None:
                yield self._fault(row, field, problem)

    def tokens(self, rows: Iterable[StoredRow], shard: StoredShard) -> Iterator[Fault]:
        """Digests of ids, positions and masks of some rows, and whether they fit each other."""
        for row in rows:
            stored: dict[str, np.ndarray] = {}
            for place, field in self.token_fields:
                try:
                    data = b"".join(map(bytes, self._read(shard, place, field, row)))
                    stored[field.name] = np.frombuffer(data, _NUMPY[field.dtype])
                except DamagedError as error:
                    yield self._fault(row, field, error.problem)
            if len(stored) == len(self.token_fields):
                found = token_problems(stored, self._manifest, row.image_tokens, row.loss_tokens)
                by_name = {field.name: field for _, field in self.token_fields}
                yield from (self._fault(row, by_name[name], problem) for name, problem in found)

    def _read(
        self, shard: StoredShard, place: int, field: Field, row: StoredRow
    ) -> Iterator[memoryview]:
        """The real bytes of a field of a row in pieces, each valid until the next.

        Raises:
            DamagedError: they are not what was written, or, at the end, not what was captured.
            OSError: they cannot be read.
        """
        state = xxhash.xxh3_64()
        for piece in shard.pieces(field, row.row, row.length):
            state.update(piece)
            yield piece
        if state.intdigest() != row.digests[place]:
            file = self._file(field)
            raise DamagedError(file, "its bytes are not those that were captured")

    def _file(self, field: Field) -> Path:
        """The file that holds a field."""
        if not self._manifest.shard_format.is_zarr:
            return self._place
        return self._place / zarr_layout(self._manifest).arrays[field.name].object

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._paths.root))

    def _fault(self, row: StoredRow, field: Field, problem: str) -> Fault:
        name = self._name(self._file(field))
        return Fault(name, problem, self._shard, row.sample, field.name, self._part)
