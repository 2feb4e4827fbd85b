"""A small sound cache whose files are changed one at a time, as damage or an enemy would."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from synthetic_cache import add_extension, write_cache

from dspark.schemas.columns import columns_layout
from dspark.schemas.digest import file_digest, json_digest
from dspark.schemas.errors import InputError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import CachePaths, columns_path, manifest_path
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import open_cache
from dspark.train_from_cache.drafts import ARCHITECTURES, draft_class
from dspark.train_from_cache.inspection import inspect_cache

SHARDS = 2
HUGE_NUMBERS = (2**31 - 1, 2**31, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, 10**400)
VALUES = (
    *(None, True, False, -1, 0, 1, 2, 3, 0.0, 1.5, -0.5, 1e308, *HUGE_NUMBERS),
    *("", "x", "../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", "\ud800", "1", "bf16"),
    *([], {}, [1], [[]], {"x": 1}, [None] * 3),
)


@dataclass(frozen=True)
class Outcome:
    """What became of opening a cache.

    Attributes:
        refusal: the sentence, or None if it opened.
        meaning: of the cache that opened, whatever its bytes.
    """

    refusal: str | None
    meaning: str


class HostileCache:
    """Each ``try_…`` changes a file, opens the cache as a trainer does, and changes it back.

    What is raised beside the project's own error goes through to the caller.
    """

    def __init__(self, root: Path) -> None:
        self.root = write_cache(
            root,
            samples=5,
            shards=SHARDS,
            max_length=9,
            layers=(0, 2),
            position_rows=3,
            logits="topk:2",
            skip_every=4,
        )
        add_extension(root, layers=(1,))
        self.paths = CachePaths(root, SHARDS)
        self.manifest = read_manifest(root)
        self.document: dict[str, Any] = json.loads(manifest_path(root).read_bytes())
        self.layout = ShardLayout(self.manifest.fields, self.manifest.rows_per_shard)
        table, self.facts = read_index(self.paths, self.manifest, 0)
        self.rows = [
            IndexRow(**{**row, "digests": tuple(row["digests"])}) for row in table.to_pylist()
        ]
        self.meaning = self.open().meaning

    def open(self) -> Outcome:
        try:
            with open_cache(self.root) as cache:
                inspect_cache(str(self.root))
                for arch in ARCHITECTURES:
                    draft_class(arch).config_from_cache(cache.manifest, {})
                state = xxhash.xxh3_64(repr(cache.manifest).encode())
                for column in (cache.lengths, cache.image_tokens, cache.loss_tokens):
                    state.update(column.tobytes())
                for shard in range(cache.manifest.num_shards):
                    table, facts = read_index(self.paths, cache.manifest, shard)
                    state.update(repr((table.to_pylist(), facts)).encode())
                for sample in range(len(cache)):
                    for tensor in cache[sample].values():
                        state.update(tensor.numpy().tobytes())
        except InputError as error:
            return Outcome(str(error), "")
        return Outcome(None, state.hexdigest())

    @contextmanager
    def _kept(self, path: Path) -> Iterator[None]:
        before = path.read_bytes()
        try:
            yield
        finally:
            path.write_bytes(before)

    def try_bytes(self, path: Path, data: bytes) -> Outcome:
        with self._kept(path):
            path.write_bytes(data)
            return self.open()

    def try_document(self, document: dict[str, Any]) -> Outcome:
        """A manifest with a right digest of its own."""
        document = {k: v for k, v in document.items() if k != "digest"}
        text = json.dumps({**document, "digest": json_digest(document)})
        return self.try_bytes(manifest_path(self.root), text.encode())

    def try_rows(self, rows: list[IndexRow], facts: dict[str, Any]) -> Outcome:
        """An index with a right digest of its own."""
        path = self.paths.index(0)
        with self._kept(path):
            try:
                write_index(path, rows, facts)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                return Outcome("cannot be written", "")  # beyond the column's type
            return self.open()

    def change_rows(self, data: DataObject) -> Outcome:
        """Change, drop, repeat or reorder rows of an index, or change its facts."""
        rows, facts = list(self.rows), dict(self.facts)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(rows) - 1)) if rows else 0
            kind = data.draw(st.sampled_from(["value", "value", "drop", "repeat", "swap", "facts"]))
            if kind == "facts":
                key = data.draw(st.sampled_from([*facts, "surprise"]))
                facts[key] = data.draw(st.sampled_from(VALUES[:-1]))
            elif not rows:
                continue
            elif kind == "value":
                name = data.draw(st.sampled_from([f.name for f in fields(IndexRow)]))
                rows[at] = replace(rows[at], **{name: data.draw(_cells(name))})
            elif kind == "drop":
                del rows[at]
            elif kind == "repeat":
                rows.insert(at, rows[at])
            else:
                rows[0], rows[at] = rows[at], rows[0]
        return self.try_rows(rows, facts)

    def change_columns(self, data: DataObject) -> Outcome:
        """Change numbers of the columns and give the manifest their digest."""
        path = columns_path(self.root)
        with self._kept(path):
            numbers = np.memmap(path, "<i4", "r+", len(columns_layout(1).header))
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, len(numbers) - 1))
                numbers[at] = data.draw(st.sampled_from([-(2**31), -1, *range(10), 2**31 - 1]))
            numbers.flush()
            digest = asdict(file_digest(path))
            return self.try_document({**self.document, "columns": digest})

    def change_bytes(self, path: Path, data: DataObject) -> Outcome:
        """Flip, cut, insert or repeat bytes of a file."""
        return self.try_bytes(path, changed_bytes(path.read_bytes(), data))

    def change_header(self, data: DataObject) -> Outcome:
        """The same in the header of a shard alone."""
        path = self.paths.shard(0)
        size = len(self.layout.header)
        whole = path.read_bytes()
        return self.try_bytes(path, changed_bytes(whole[:size], data) + whole[size:])

    def change_document(self, data: DataObject) -> Outcome:
        """Change entries of the manifest and give it a right digest again."""
        document = copy.deepcopy(self.document)
        for _ in range(data.draw(st.integers(1, 3))):
            _change_entry(document, data)
        return self.try_document(document)

    def change_text(self, data: DataObject) -> Outcome:
        """Put text that is no plain JSON value in the place of one."""
        document = copy.deepcopy(self.document)
        place = data.draw(st.sampled_from(list(_places(document))))
        place[0][place[1]] = "PLACE"
        odd = data.draw(
            st.sampled_from(
                [
                    *("NaN", "-Infinity", "1e999", "1" * 5000, "[" * 10**5, '{"a":1,"a":1}'),
                    *(
                        "[" * 90 + "]" * 90,
                        '{"a":' * 90 + "1" + "}" * 90,
                        "",
                        "'x'",
                        "01",
                        '"\udcff"',
                    ),
                    '"' + "x" * 10**6 + '"',
                ]
            )
        )
        text = json.dumps(document).replace('"PLACE"', odd)
        return self.try_bytes(manifest_path(self.root), text.encode(errors="surrogateescape"))


def changed_bytes(data: bytes, draw: DataObject) -> bytes:
    for _ in range(draw.draw(st.integers(1, 4))):
        if not data:
            break
        at = draw.draw(st.integers(0, len(data) - 1))
        kind = draw.draw(
            st.sampled_from(["flip", "flip", "flip", "cut", "insert", "repeat", "end"])
        )
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ draw.draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + draw.draw(st.integers(1, 40)) :]
        elif kind == "insert":
            data = data[:at] + draw.draw(st.binary(min_size=1, max_size=12)) + data[at:]
        elif kind == "repeat":
            data = data[: at + draw.draw(st.integers(1, 40))] + data[at:]
        else:
            data = data[:at]
    return data


def _cells(name: str) -> st.SearchStrategy[Any]:
    """Values for a column of the index."""
    if name == "digests":
        return st.lists(st.integers(0, 2**64 - 1), max_size=12).map(tuple)
    if name in ("id", "status", "reason"):
        return st.sampled_from(["", "ok", "skipped", "OK", "x", "\ud800", "a\0", "z" * 10**5])
    return st.sampled_from([-(2**31), -1, 0, 1, 2, 5, 8, 9, 10, 2**31 - 1, 2**31, 2**63 - 1, 2**63])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each entry of a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _change_entry(document: dict[str, Any], data: DataObject) -> None:
    container, key = data.draw(st.sampled_from(list(_places(document))))
    kinds: dict[str, Callable[[], None]] = {
        "replace": lambda: container.__setitem__(key, copy.deepcopy(data.draw(_values(document)))),
        "delete": lambda: container.__delitem__(key),
    }
    if isinstance(container, list):
        kinds["repeat"] = lambda: container.insert(key, copy.deepcopy(container[key]))
    else:
        kinds["rename"] = lambda: container.__setitem__(
            data.draw(st.sampled_from(["", "surprise", "../x", *container])), container.pop(key)
        )
    kinds[data.draw(st.sampled_from(["replace", *kinds]))]()


def _values(document: dict[str, Any]) -> st.SearchStrategy[Any]:
    others = [container[key] for container, key in _places(document)]
    return st.sampled_from([*VALUES, *others])
