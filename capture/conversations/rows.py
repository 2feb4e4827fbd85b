"""The rows of a dataset, in order, each read when it is asked for."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.data_files import DataFile, open_data
from dspark.capture.conversations.download import KEEP_BYTES, Downloads
from dspark.capture.conversations.layouts import KNOWN, Layout, recognise
from dspark.capture.conversations.messages import canonical_messages, read_tools
from dspark.capture.conversations.picture_sources import PictureSource
from dspark.capture.conversations.placement import place_pictures
from dspark.capture.conversations.records import COLUMNS, Record
from dspark.capture.settings import RowOptions
from dspark.schemas.conversations import ConversationRow
from dspark.schemas.errors import InputError

_HEAD = 64


class Conversations:
    """The conversations of one or several files, numbered through; nothing is held in memory.

    Processes that are forked from this one may all read.

    Attributes:
        path: as given.
        layout: what the files were recognised as, for a reader.
    """

    def __init__(
        self, path: Path, files: list[DataFile], options: RowOptions, readers: int = 1
    ) -> None:
        self.path = path
        self._files = files
        self._ends = list(accumulate(len(file.records) for file in files))
        self._layouts = [_layout(file) for file in files]
        self.layout = "; ".join(dict.fromkeys(a.name for a in self._layouts if a is not None))
        downloads = Downloads(keep_bytes=KEEP_BYTES // readers) if options.allow_download else None
        self._pictures = [
            PictureSource(options.image_root or file.folder, downloads) for file in files
        ]
        self._last: tuple[int, Record] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def id(self, sample: int) -> str:
        """The dataset's own id of a row; an empty string if it has none or cannot be read."""
        try:
            return _id(self._record(sample))
        except BadRowError:
            return ""

    def read(self, sample: int) -> ConversationRow:
        """A row with its pictures decoded to RGB.

        Raises:
            BadRowError: the row is no conversation, or a picture cannot be had.
        """
        record = self._record(sample)
        file = self._locate(sample)[0]
        layout = self._layouts[file]
        assert layout is not None  # only a file without rows has none
        raw = layout.read(record)
        messages = place_pictures(
            canonical_messages(raw), raw.pictures, marked=raw.marked, leading=raw.leading
        )
        number = 0
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = self._pictures[file].open(part["image"], f"picture {number}")
                    number += 1
        return ConversationRow(_id(record), messages, read_tools(raw.tools))

    def where(self, sample: int) -> str:
        """Words for a row: its number, and the file that it is in if there are several."""
        if len(self._files) == 1:
            return f"row {sample}"
        file, row = self._locate(sample)
        return f"row {sample} (row {row} of {self._files[file].path})"

    def fingerprint(self) -> str:
        """A digest of all files' contents in their order, in hex."""
        digests = [file.records.fingerprint() for file in self._files]
        return (
            digests[0]
            if len(digests) == 1
            else xxhash.xxh3_64("".join(digests).encode()).hexdigest()
        )

    def _locate(self, sample: int) -> tuple[int, int]:
        file = bisect_right(self._ends, sample)
        return file, sample - (self._ends[file - 1] if file else 0)

    def _record(self, sample: int) -> Record:
        if self._last is None or self._last[0] != sample:
            file, row = self._locate(sample)
            self._last = None
            self._last = sample, self._files[file].records.read(row)
        return self._last[1]


def open_conversations(
    path: Path, options: RowOptions | None = None, *, readers: int = 1
) -> Conversations:
    """Open what ``--data`` names (see ``data_files.open_data``) and recognise its layout.

    Args:
        path: what it names.
        options: how rows are read; the defaults of ``RowOptions`` without.
        readers: processes that will read, which share the room for temporary files.

    Raises:
        InputError: nothing is there, it cannot be read, or its layout is unknown.
    """
    options = options or RowOptions()
    if options.image_root is not None and not options.image_root.is_dir():
        raise InputError(f"--image-root {options.image_root}: no such folder")
    try:
        files = open_data(path, readers)
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror or error}") from None
    return Conversations(path, files, options, readers)


def _layout(file: DataFile) -> Layout | None:
    if len(file.records) == 0:
        return None
    columns = file.records.columns()
    known = not {*columns}.isdisjoint(COLUMNS)
    records = file.records.head(_HEAD) if known else []
    layout = recognise(records, columns)
    if layout is not None:
        return layout
    if not columns:
        raise InputError(
            f"--data {file.path}: none of its first {_HEAD} rows can be read{_problem(file, 0)}"
        )
    raise InputError(
        f"--data {file.path}: unknown layout; its columns are {_described(records, columns)}; "
        f"known layouts are {KNOWN}"
    )


def _problem(file: DataFile, row: int) -> str:
    try:
        file.records.read(row)
    except BadRowError as error:
        return f" (row {row}: {error})"
    return ""


def _described(records: list[Record], columns: list[str]) -> str:
    """The columns found, with the keys of those that are lists of objects."""
    return ", ".join(name + _item_keys(records, name) for name in columns) or "none"


def _item_keys(records: list[Record], column: str) -> str:
    for record in records:
        value: Any = record.get(column)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f" (of {', '.join(map(str, value[0]))})"
    return ""


def _id(record: Record) -> str:
    value = record.get("id")
    return "" if value is None else str(value).encode(errors="replace").decode()
