"""From what ``--data`` names to files, and from files to their records."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from dspark.capture.conversations.arrow_batches import IPC_FILE, IPC_STREAM
from dspark.capture.conversations.arrow_ipc import ArrowRecords
from dspark.capture.conversations.hub_dataset import HubDataset, is_saved_dataset
from dspark.capture.conversations.json_array import open_json_array
from dspark.capture.conversations.json_lines import open_json_lines
from dspark.capture.conversations.parquet import ParquetRecords
from dspark.capture.conversations.records import Records
from dspark.capture.conversations.spool import SPOOL_BYTES, SpoolCache
from dspark.schemas.errors import InputError

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".arrow", ".ipc", ".feather")
_LINES_SUFFIXES = (".jsonl", ".ndjson")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class DataFile:
    """Attributes:
    path: of the file, or the name of the dataset.
    folder: that relative picture paths start from.
    records: the file's rows.
    """

    path: Path
    folder: Path
    records: Records


def open_data(data: Path, readers: int = 1) -> list[DataFile]:
    """The files that ``--data`` names, in order, each with its records.

    Args:
        data: a file; a folder (its files with one of ``SUFFIXES``, sorted by name) or a glob
            (sorted by path); a folder that ``datasets`` saved, or a Hugging Face id, either
            followed by ``:split`` where it has several.
        readers: processes that will read, which share the room for temporary files.

    Raises:
        InputError: nothing is there, or it cannot be read.
    """
    name, _, split = str(data).rpartition(":") if not data.exists() else (str(data), "", "")
    name = name or str(data)
    if is_saved_dataset(Path(name)):
        folder = Path(name)
        return [DataFile(folder, folder, HubDataset(name, split, saved=True))]
    spools = SpoolCache(SPOOL_BYTES // readers)
    if data.is_dir():
        paths = sorted(p for p in data.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
        if not paths:
            raise InputError(
                f"--data {data}: the folder holds no conversation file ({', '.join(SUFFIXES)})"
            )
    elif data.exists():
        paths = [data]
    elif glob.has_magic(str(data)):
        paths = sorted(p for p in map(Path, glob.glob(str(data), recursive=True)) if p.is_file())
        if not paths:
            raise InputError(f"--data {data}: no file matches")
    elif _HUB_ID.fullmatch(name) and Path(name).suffix.lower() not in SUFFIXES:
        return [DataFile(data, Path(), HubDataset(name, split, saved=False))]
    else:
        raise InputError(f"--data {data}: no such file")
    return [DataFile(path, path.parent, open_records(path, spools)) for path in paths]


def open_records(path: Path, spools: SpoolCache) -> Records:
    """Open a file by what it begins with, not by its name.

    Raises:
        InputError: not readable, or of no known kind.
    """
    try:
        with open(path, "rb") as f:
            start = f.read(4096)
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror}") from None
    if start.startswith(b"PAR1"):
        return ParquetRecords(path, spools)
    if start.startswith(b"ARROW1"):
        return ArrowRecords(path, IPC_FILE, spools)
    if start.startswith(b"\xff\xff\xff\xff"):
        return ArrowRecords(path, IPC_STREAM, spools)
    suffix = path.suffix.lower()
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and suffix not in _LINES_SUFFIXES:
        return open_json_array(path)
    if suffix in (*_LINES_SUFFIXES, ".json") or text.startswith(b"{"):
        return open_json_lines(path)
    raise InputError(
        f"--data {path}: neither Parquet, Arrow IPC, JSON Lines nor a JSON array; convert it to "
        "one of them"
    )
