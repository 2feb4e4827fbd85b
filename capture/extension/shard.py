"""The rows of a shard that are stored already, captured once more for other fields."""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dspark.capture.conversations import Conversations
from dspark.capture.new_shard import NON_FINITE, NewShard
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, ids_digest
from dspark.capture.targets.features import Features
from dspark.capture.targets.target import Target
from dspark.schemas.commands import repair_command
from dspark.schemas.digest import field_digest
from dspark.schemas.errors import DamagedError, IncompatibleCacheError, InputError
from dspark.schemas.index import OK, IndexRow, read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.row_bytes import read_field
from dspark.schemas.stored_shard import open_shard, shard_place
from dspark.schemas.tolerance import token_error, tolerance


class ExtendedShard(NewShard):
    """A shard whose rows must be those that are stored; the target is proved on its first batch.

    Rows that were skipped are skipped again.

    Args:
        shard: its number.
        plan: of the extension.
        target: the frozen target.
        conversations: the dataset.
        root: the cache.
        first: manifest of its first part.
    """

    def __init__(
        self,
        shard: int,
        plan: CapturePlan,
        target: Target,
        conversations: Conversations,
        *,
        root: Path,
        first: Manifest,
    ) -> None:
        super().__init__(shard, plan, target, conversations)
        self._root = root
        self._first = first
        self._paths = CachePaths(root, first.num_shards)
        self._path = shard_place(self._paths, first, shard)
        self._stored: dict[int, IndexRow] = {}

    def begin(self) -> tuple[list[IndexRow], list[int]]:
        """Rows that ran in a batch run again; the others are skipped again.

        Raises:
            IncompatibleCacheError: the shard's index is damaged.
        """
        table, _ = read_index(self._paths, self._first, self.number)
        entries = (IndexRow(**{**e, "digests": tuple(e["digests"])}) for e in table.to_pylist())
        self._stored = {entry.sample: entry for entry in entries}
        ran = [s for s, e in self._stored.items() if e.status == OK or e.reason == NON_FINITE]
        return [self._stored[s] for s in sorted({*self._stored} - {*ran})], ran

    def accept(self, row: EncodedRow | SkippedRow) -> EncodedRow:
        """The row, if its ids are those that are stored.

        Raises:
            IncompatibleCacheError: the shard is damaged.
            InputError: the row is not as it was.
        """
        if isinstance(row, SkippedRow):
            raise self._other(row.sample, f"it cannot be captured any more ({row.reason})")
        stored = self._stored[row.sample]
        if stored.status == OK:
            ids = self._read("input_ids", stored)
            if ids_digest(ids) != row.ids_digest:
                raise self._other(
                    row.sample, f"its {len(row)} tokens are not the {len(ids)} that are stored"
                )
        return row

    @property
    def needs_logits(self) -> bool:
        return False

    def check_first_batch(self, rows: Sequence[EncodedRow], features: Features) -> None:
        """Compare the first batch's ``last_hidden_state`` with what is stored of it."""
        now = features.stored["last_hidden_state"].cpu()
        allowed = tolerance(self._first)
        start = 0
        for row in rows:
            here = now[start : start + len(row)]
            start += len(row)
            if self._stored[row.sample].status != OK:
                continue
            there = self._read("last_hidden_state", self._stored[row.sample])
            if torch.equal(there.view(torch.uint8), here.contiguous().view(torch.uint8)):
                continue
            error = token_error(there, here)
            if error > allowed:
                raise InputError(
                    f"--extend: the target does not give what is stored in {self._path}: a token's "
                    f"last_hidden_state of dataset row {row.sample} is off by {error:.2g} of its "
                    f"length, {allowed:g} is allowed; use the target, the versions and the kind of "
                    "device of the capture"
                )
            _warn_of_rounding()

    def index_row(self, row: EncodedRow, *, finite: bool) -> IndexRow:
        """The stored entry.

        Raises:
            InputError: a stored row is not finite in the new fields.
        """
        stored = self._stored[row.sample]
        if stored.status == OK and not finite:
            raise InputError(
                f"--extend: {self.conversations.where(row.sample)} is stored and has numbers "
                f"beyond {self._first.dtype} in a field that is to be added; add other fields, or "
                "capture anew into another --out, which skips it"
            )
        return stored

    def _read(self, name: str, entry: IndexRow) -> Tensor:
        """A stored field of a row, compared with its digest."""
        place = [f.name for f in self._first.fields].index(name)
        field = self._first.fields[place]
        try:
            with open_shard(self._paths, self._first, self.number) as shard:
                stored = read_field(shard, field, entry.row, entry.length)
            sound = field_digest(stored.view(torch.uint8).numpy().data) == entry.digests[place]
        except DamagedError:
            sound = False
        if not sound:
            raise IncompatibleCacheError(
                f"{self._path}: {name} of dataset row {entry.sample} is damaged; run "
                f"'{repair_command(self._root)}', which names what then finishes the cache"
            )
        return stored

    def _other(self, sample: int, how: str) -> InputError:
        return InputError(
            f"--data {self.conversations.path}: {self.conversations.where(sample)} is not the row "
            f"that was captured ({how}); give the data and the target of the capture"
        )


@cache
def _warn_of_rounding() -> None:
    logging.getLogger(__name__).warning(
        "dspark: --extend: the target gives what is stored but for rounding, as on another kind of "
        "device or with another number of threads"
    )
