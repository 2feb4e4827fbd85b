"""How features are kept and read elsewhere, each in the plainest way that is fast.

All give the same batches: tensors ``[B, L, …]``, padded with zeros to the longest row of the batch,
but for padded shards, which are ``[B, T, …]`` as they are stored.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache as cached
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.fields import Field
from dspark.train_from_cache.cache import Cache

Row = dict[str, Tensor]


class PlainReader(Dataset[Row], ABC):
    """Files of another form, and how a training reads them.

    Args:
        folder: of the files.
        fields: of a row.
        max_length: T.
    """

    name: str
    form: str

    def __init__(self, folder: Path, fields: Sequence[Field], max_length: int) -> None:
        self.folder = folder
        self.fields = fields
        self.max_length = max_length

    @abstractmethod
    def write(self, cache: Cache) -> None:
        """Write the rows of a cache, and what it takes to find them."""

    @abstractmethod
    def __getitem__(self, row: int) -> Row:
        """The tensors of a row."""

    def collate(self, rows: Sequence[Row]) -> Row:
        """A batch of rows without padding."""
        return {
            field.name: pad_sequence([row[field.name] for row in rows], batch_first=True)
            for field in self.fields
        }


class PaddedShards(PlainReader):
    """safetensors of ``[S, T, …]``; ``get_slice`` and ``stack``."""

    name = "padded safetensors"
    form = "padded"
    rows_per_file = 8

    def write(self, cache: Cache) -> None:
        for start in range(0, len(cache), self.rows_per_file):
            rows = [cache[i] for i in range(start, min(start + self.rows_per_file, len(cache)))]
            shard = {
                f.name: torch.zeros(len(rows), *f.row_shape, dtype=rows[0][f.name].dtype)
                for f in self.fields
            }
            for i, row in enumerate(rows):
                for name, padded in shard.items():
                    padded[i, : len(row[name])] = row[name]
            save_file(shard, self._path(start))

    def _path(self, row: int) -> Path:
        return self.folder / f"{row // self.rows_per_file:05}.safetensors"

    @cached  # noqa: B019  # one handle for each file
    def _open(self, path: Path) -> Any:
        return safe_open(path, framework="pt")

    def __getitem__(self, row: int) -> Row:
        file = self._open(self._path(row))
        at = row % self.rows_per_file
        return {field.name: file.get_slice(field.name)[at] for field in self.fields}

    def collate(self, rows: Sequence[Row]) -> Row:
        batch: Row = default_collate(list(rows))
        return batch


class PaddedShardsSliced(PaddedShards):
    """The same files, of which only real tokens are read: ``get_slice(…)[row, :length]``."""

    name = "padded safetensors, real tokens sliced"

    def write(self, cache: Cache) -> None:
        np.save(self.folder / "lengths.npy", cache.lengths)

    @cached  # noqa: B019
    def _lengths(self) -> np.ndarray:
        lengths: np.ndarray = np.load(self.folder / "lengths.npy")
        return lengths

    def __getitem__(self, row: int) -> Row:
        file = self._open(self._path(row))
        at, length = row % self.rows_per_file, int(self._lengths()[row])
        return {field.name: file.get_slice(field.name)[at, :length] for field in self.fields}

    def collate(self, rows: Sequence[Row]) -> Row:
        return PlainReader.collate(self, rows)


class RaggedBinary(PlainReader):
    """For each field one file of all rows one after another, mapped; copied and padded."""

    name = "ragged binary, mapped"
    form = "ragged"

    def write(self, cache: Cache) -> None:
        np.save(self.folder / "ends.npy", np.cumsum(cache.lengths, dtype=np.int64))
        with ExitStack() as opened:
            files = {
                field.name: opened.enter_context(open(self.folder / f"{field.name}.bin", "wb"))
                for field in self.fields
            }
            for i in range(len(cache)):
                row = cache[i]
                for name, file in files.items():
                    file.write(row[name].view(torch.uint8).numpy().tobytes())

    @cached  # noqa: B019
    def _open(self) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        maps = {
            field.name: np.memmap(
                self.folder / f"{field.name}.bin",
                np.uint8,
                "c",  # torch wants them writable
            ).reshape(-1, field.token_bytes)
            for field in self.fields
        }
        return np.load(self.folder / "ends.npy"), maps

    def __getitem__(self, row: int) -> Row:
        ends, maps = self._open()
        start = ends[row - 1] if row else 0
        return {
            field.name: _typed(torch.from_numpy(maps[field.name][start : ends[row]]), field)
            for field in self.fields
        }


class FilePerSample(PlainReader):
    """A safetensors file for each row, loaded and padded."""

    name = "one safetensors file per sample"
    form = "files"

    def write(self, cache: Cache) -> None:
        for i in range(len(cache)):
            row = cache[i]
            save_file({field.name: row[field.name] for field in self.fields}, self._path(i))

    def _path(self, row: int) -> Path:
        return self.folder / f"{row:06}.safetensors"

    def __getitem__(self, row: int) -> Row:
        return load_file(self._path(row))


def _typed(data: Tensor, field: Field) -> Tensor:
    typed = data.view(torch_dtype(field.dtype))
    return typed.view(-1, *field.row_shape[1:])


THREADS = "4 threads"
HOW = ("0 workers", "1 worker", "2 workers", THREADS)
"""How batches are made: in the worker processes of a ``DataLoader``, or in threads."""


def batches_of(reader: PlainReader, batches: Sequence[list[int]], how: str) -> Iterator[Row]:
    """The batches of some rows.

    Args:
        reader: the files.
        batches: rows of each.
        how: of ``HOW``.
    """
    if how == THREADS:
        return _in_threads(reader, batches)
    workers = int(how.split()[0])
    return iter(
        DataLoader(
            reader,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=reader.collate,
            prefetch_factor=2 if workers else None,
        )
    )


def _in_threads(reader: PlainReader, batches: Sequence[list[int]]) -> Iterator[Row]:
    """Batches made by four threads, four of them ahead."""
    with ThreadPoolExecutor(4) as pool:
        ahead: deque[Any] = deque()
        for rows in batches:
            ahead.append(pool.submit(lambda some: reader.collate([reader[i] for i in some]), rows))
            if len(ahead) > 4:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
