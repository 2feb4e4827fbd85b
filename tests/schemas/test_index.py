"""The sample index: a round trip, and every kind of damage is one sentence."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from rights import no_rights
from synthetic_cache import write_cache

from dspark.schemas.commands import repair_command
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.index import (
    OK,
    SCHEMA,
    SKIPPED,
    IndexRow,
    index_identity,
    read_index,
    write_index,
)
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.paths import CachePaths

SHARDS = 3


@pytest.fixture
def cache(tmp_path: Path) -> tuple[CachePaths, Manifest]:
    root = write_cache(tmp_path / "cache", samples=10, shards=SHARDS, skip_every=3)
    return CachePaths(root, SHARDS), read_manifest(root)


def rows_of(table: pa.Table) -> list[IndexRow]:
    return [IndexRow(**{**row, "digests": tuple(row["digests"])}) for row in table.to_pylist()]


def test_round_trip(cache: tuple[CachePaths, Manifest]) -> None:
    paths, manifest = cache
    fields = len(manifest.fields)
    rows = [
        IndexRow(0, 0, "ä \U0001f984", OK, "", 9, 3, 2, (2**64 - 1, *range(fields - 1))),
        IndexRow(1, 1, "", SKIPPED, "too long: 99 tokens"),
        IndexRow(2, 2, "x" * 1000, OK, "", 32, 32, 0, (0,) * fields),
        IndexRow(3, 3, "\0", OK, "", 1, 0, 1, (7,) * fields),
    ]
    for error in (None, 0.0, 1e-300, 0.125):
        facts = {"head_error": error, "identity": manifest.identity_hash}
        write_index(paths.index(0), rows, facts)
        table, found = read_index(paths, manifest, 0)
        assert found == facts
        assert rows_of(table) == rows
        assert index_identity(paths.index(0)) == manifest.identity_hash


def test_any_parquet_reader_opens_it(cache: tuple[CachePaths, Manifest]) -> None:
    paths, manifest = cache
    table = pq.read_table(paths.index(1))
    assert table.column_names == SCHEMA.names
    assert table.equals(read_index(paths, manifest, 1)[0])


def test_a_shard_without_samples_has_an_index(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", samples=5, shards=4)
    table, _ = read_index(CachePaths(root, 4), read_manifest(root), 3)
    assert len(table) == 0


def test_the_content_digest_is_as_documented(cache: tuple[CachePaths, Manifest]) -> None:
    """Made again with struct alone, from what docs/cache-format.md says."""
    paths, manifest = cache
    table, facts = read_index(paths, manifest, 0)
    data = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    formats = {"sample": "<q", "row": "<i", "length": "<i", "image_tokens": "<i"}
    for name in table.column_names:
        values = table[name].to_pylist()
        if name in ("id", "status", "reason"):
            data += b"".join(struct.pack("<i", len(v.encode())) for v in values)
            data += b"".join(v.encode() for v in values)
        elif name == "digests":
            data += b"".join(struct.pack("<i", len(v)) for v in values)
            data += b"".join(struct.pack("<Q", x) for v in values for x in v)
        else:
            data += b"".join(struct.pack(formats.get(name, "<i"), v) for v in values)
    metadata = json.loads(pq.read_schema(paths.index(0)).metadata[b"dspark"])
    assert metadata["content"] == xxhash.xxh3_64_hexdigest(data)


def test_each_flipped_byte_is_found_or_means_nothing(cache: tuple[CachePaths, Manifest]) -> None:
    paths, manifest = cache
    path = paths.index(1)
    data = path.read_bytes()
    want = read_index(paths, manifest, 1)
    found = 0
    rng = np.random.RandomState(0)
    for at in range(rng.randint(3), len(data), 3):
        flipped = data[at] ^ (1 << rng.randint(8))
        path.write_bytes(data[:at] + bytes([flipped]) + data[at + 1 :])
        try:
            got = read_index(paths, manifest, 1)
        except IncompatibleCacheError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
            found += 1
        else:
            assert got == want, at
    assert found > len(data) / 3 / 2


Change = Callable[[list[IndexRow], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows, _: rows.pop(), "3 rows for 4 samples"),
        (lambda rows, _: rows.append(rows[0]), "5 rows for 4 samples"),
        (lambda rows, _: rows.__setitem__(1, rows[0]), "dataset rows 0 to 3"),
        (lambda rows, _: rows.reverse(), "dataset rows 0 to 3"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], row=1)), "rows of the shard"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], status="fine")), "status"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], length=-1)), "row's length"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], length=0)), "row's length"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], length=33)), "row's length"),
        (lambda rows, _: rows.__setitem__(2, replace(rows[2], length=3)), "row's length"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], image_tokens=33)), "image_tokens"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], loss_tokens=-1)), "loss_tokens"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], digests=(1,))), "digest for each"),
        (lambda rows, _: rows.__setitem__(2, replace(rows[2], digests=(1,))), "digest for each"),
        (lambda rows, _: rows.__setitem__(0, replace(rows[0], digests=())), "digest for each"),
        (lambda _, facts: facts.update(identity="0" * 16), "other settings"),
        (lambda _, facts: facts.update(identity=3), "metadata"),
        (lambda _, facts: facts.update(head_error=-1.0), "metadata"),
        (lambda _, facts: facts.update(head_error="0"), "metadata"),
        (lambda _, facts: facts.update(surprise=1), "metadata"),
        (lambda _, facts: facts.pop("head_error"), "metadata"),
    ],
)
def test_rows_that_cannot_be_are_refused_although_the_digest_is_right(
    cache: tuple[CachePaths, Manifest], change: Change, words: str
) -> None:
    paths, manifest = cache
    table, facts = read_index(paths, manifest, 0)
    rows = rows_of(table)
    change(rows, facts)
    write_index(paths.index(0), rows, facts)
    with pytest.raises(IncompatibleCacheError, match=words) as error:
        read_index(paths, manifest, 0)
    assert repair_command(paths.root) in str(error.value)


def nullable(table: pa.Table) -> pa.Table:
    where = table.schema.get_field_index("length")
    column = pa.array([None] * len(table), pa.int32())
    return table.set_column(where, pa.field("length", pa.int32()), column)


@pytest.mark.parametrize(
    ("table_change", "options", "words"),
    [
        (nullable, {}, "columns"),
        (lambda t: t.drop_columns(["digests"]), {}, "columns"),
        (lambda t: t.rename_columns(["Sample", *t.column_names[1:]]), {}, "columns"),
        (lambda t: t.select(list(reversed(t.column_names))), {}, "columns"),
        (
            lambda t: t.set_column(0, "sample", t["sample"].cast(pa.int32())),
            {},
            "columns",
        ),
        (lambda t: t.replace_schema_metadata(None), {}, "metadata"),
        (lambda t: t.replace_schema_metadata({b"dspark": b"[" * 10**5}), {}, "nested"),
        (lambda t: t.replace_schema_metadata({b"dspark": b"\xff"}), {}, "utf-8"),
        (lambda t: t, {"compression": "zstd"}, "a column is packed"),
        (lambda t: t, {"use_dictionary": True}, "packed"),
        (lambda t: t, {"data_page_version": "2.0"}, "footer lacks something"),
    ],
)
def test_other_parquet_is_refused(
    cache: tuple[CachePaths, Manifest],
    table_change: Callable[[pa.Table], pa.Table],
    options: dict[str, Any],
    words: str,
) -> None:
    paths, manifest = cache
    table = table_change(pq.read_table(paths.index(0)))
    pq.write_table(
        table, paths.index(0), **{"compression": "none", "use_dictionary": False, **options}
    )
    with pytest.raises(IncompatibleCacheError, match=words):
        read_index(paths, manifest, 0)


def test_text_that_is_not_utf_8_is_refused(cache: tuple[CachePaths, Manifest]) -> None:
    paths, manifest = cache
    data = paths.index(0).read_bytes()
    assert data.count(b"id-0") == 1
    paths.index(0).write_bytes(data.replace(b"id-0", b"id\xff\xfe"))
    with pytest.raises(IncompatibleCacheError, match="UTF"):
        read_index(paths, manifest, 0)


def test_rows_beyond_the_shard_are_not_decoded(cache: tuple[CachePaths, Manifest]) -> None:
    """A small file of very many rows: its footer is enough to refuse it."""
    paths, manifest = cache
    table = pq.read_table(paths.index(0))
    rows = table.slice(0, 1).take(np.zeros(200_000, np.int64))
    pq.write_table(rows, paths.index(0), compression="zstd")
    assert paths.index(0).stat().st_size < 100_000
    with pytest.raises(IncompatibleCacheError, match="200,000 rows for 4 samples"):
        read_index(paths, manifest, 0)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def levels(*runs: tuple[int, int]) -> bytes:
    """Repetition or definition levels: (count, level) of each run."""
    data = b"".join(varint(count << 1) + bytes([level]) for count, level in runs)
    return struct.pack("<I", len(data)) + data


def page(size: int, values: int, encoding: int, data: bytes) -> bytes:
    """A data page of ``size`` bytes, header included."""

    def header(length: int) -> bytes:
        head = b"\x15\x00\x15" + varint(length << 1) + b"\x15" + varint(length << 1)
        head += b"\x2c\x15" + varint(values << 1) + b"\x15" + varint(encoding << 1)
        return head + b"\x15\x06\x15\x06\x00\x00"

    length = size - len(header(64))
    return header(length) + data.ljust(length, b"\0")


def test_pages_that_declare_more_than_they_hold_are_not_decoded(
    cache: tuple[CachePaths, Manifest],
) -> None:
    """Thirteen bytes of levels would become ten gigabytes, whatever the footer says."""
    paths, manifest = cache
    table, facts = read_index(paths, manifest, 0)
    write_index(paths.index(0), rows_of(table), facts)
    data = paths.index(0).read_bytes()
    chunk = pq.read_metadata(paths.index(0)).row_group(0).column(8)
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    many = 2**31 - 2
    for values, encoding, words in ((many, 0, "more values than fit"), (12, 8, "a page is packed")):
        body = levels((1, 0), (values - 1, 1)) + levels((values, 0))
        bad = page(size, values, encoding, body)
        assert len(bad) == size
        paths.index(0).write_bytes(data[:start] + bad + data[start + size :])
        with pytest.raises(IncompatibleCacheError, match=words):
            read_index(paths, manifest, 0)


@settings(max_examples=200)
@given(data=st.binary(max_size=40))
def test_any_bytes_in_the_place_of_a_page(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.getbasetemp() / "any_bytes"
    if not root.exists():
        write_cache(root, samples=4, shards=1)
    paths, manifest = CachePaths(root, 1), read_manifest(root)
    whole = paths.index(0).read_bytes()
    start = pq.read_metadata(paths.index(0)).row_group(0).column(0).data_page_offset
    try:
        paths.index(0).write_bytes(whole[:start] + data + whole[start + len(data) :])
        want = None if whole[start : start + len(data)] == data else IncompatibleCacheError
        try:
            read_index(paths, manifest, 0)
        except IncompatibleCacheError:
            assert want is not None
    finally:
        paths.index(0).write_bytes(whole)


@pytest.mark.parametrize("what", ["missing", "directory", "pipe", "text", "empty"])
def test_what_is_no_index_at_all(cache: tuple[CachePaths, Manifest], what: str) -> None:
    paths, manifest = cache
    path = paths.index(0)
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what != "missing":
        path.write_bytes(b"no Parquet" if what == "text" else b"")
    with pytest.raises(IncompatibleCacheError, match=str(path)):
        read_index(paths, manifest, 0)
    assert index_identity(path) is None


def test_an_index_that_cannot_be_read_may_be_sound(tmp_path: Path) -> None:
    path = CachePaths(write_cache(tmp_path), 3).index(1)
    with no_rights(path), pytest.raises(PermissionError) as error:
        index_identity(path)
    assert error.value.filename == str(path)
    with no_rights(path), pytest.raises(UnreadableError, match="make it readable"):
        read_index(CachePaths(tmp_path, 3), read_manifest(tmp_path), 1)
    path.unlink()
    assert index_identity(path) is None


def test_a_symbolic_link_is_followed(cache: tuple[CachePaths, Manifest]) -> None:
    paths, manifest = cache
    elsewhere = paths.root.parent / "index.parquet"
    want = read_index(paths, manifest, 0)
    paths.index(0).rename(elsewhere)
    paths.index(0).symlink_to(elsewhere)
    assert read_index(paths, manifest, 0) == want
