"""Any row in any order is what a library reads from the whole file in order."""

import errno
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations import (
    arrow_batches,
    data_files,
    json_array,
    json_lines,
    parquet,
    spool,
)
from dspark.schemas.errors import InputError

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
json_records = st.lists(st.dictionaries(texts, values, max_size=3), max_size=12)


def opened(path: Path) -> Any:
    return data_files.open_records(path, spool.SpoolCache())


def in_any_order(
    records: Any, expected: list[Any], seed: int = 0, *, pictureless_head: bool = True
) -> None:
    assert len(records) == len(expected)
    rows = [*range(len(expected))] * 2
    random.Random(seed).shuffle(rows)
    for row in rows:
        assert records.read(row) == expected[row]
    pictures = ("images", "image") if pictureless_head else ()
    assert records.head(3) == [
        {k: v for k, v in r.items() if k not in pictures} for r in expected[:3]
    ]


@quick
@given(json_records, st.data())
def test_json_lines(monkeypatch: pytest.MonkeyPatch, records: list[dict], data: Any) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK", data.draw(st.integers(1, 40)))
    ends = data.draw(
        st.lists(
            st.sampled_from(["\n", "\r\n", "\n\n", "\n \n", " \r\n\t\r\n"]),
            min_size=len(records),
            max_size=len(records),
        )
    )
    ascii_only = data.draw(st.booleans())
    text = "".join(
        json.dumps(r, ensure_ascii=ascii_only) + e for r, e in zip(records, ends, strict=True)
    )
    if data.draw(st.booleans()):
        text = text.rstrip("\n\r \t")
    mark = data.draw(st.sampled_from(["", "\ufeff"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.jsonl"
        path.write_bytes((mark + text).encode())
        in_any_order(opened(path), records, pictureless_head=False)


@quick
@given(json_records, st.integers(2, 40), st.sampled_from([None, 0, 3, "\t"]), st.booleans())
def test_json_array(
    monkeypatch: pytest.MonkeyPatch, records: list[dict], chunk: int, indent: Any, ascii_only: bool
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", chunk)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.json"
        text = json.dumps(records, indent=indent, ensure_ascii=ascii_only)
        path.write_text(f" {text} \n", encoding="utf-8")
        in_any_order(opened(path), json.loads(path.read_bytes()), pictureless_head=False)


def record(i: int) -> dict[str, Any]:
    """Some fields of the parts and some columns are null, as column-wise files have them."""
    parts = [{"type": "text", "text": f"wörd {i}", "image": None}]
    if i % 3 == 0:
        parts.append({"type": "image", "text": None, "image": f"{i}.png"})
    return {
        "id": None if i % 5 == 4 else f"r{i}",
        "messages": None if i % 7 == 6 else [{"role": "user", "content": parts}],
        "images": [{"bytes": bytes([i % 256]) * (i * 7 % 50), "path": None}] * (i % 3),
        "embedding": [float(i)],
    }


def stripped(value: Any) -> Any:
    """The test's own idea of a record of a column-wise file."""
    if isinstance(value, dict):
        return {k: stripped(v) for k, v in value.items() if v is not None}
    return [stripped(v) for v in value] if isinstance(value, list) else value


def expected_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: stripped(r[k]) for k in ("id", "messages", "images")}  # what layouts read, no more
        for r in rows
    ]


@quick
@given(st.integers(0, 60), st.integers(1, 70), st.booleans(), st.integers(1, 2000))
def test_parquet(
    monkeypatch: pytest.MonkeyPatch, count: int, group: int, spooled: bool, batch: int
) -> None:
    monkeypatch.setattr(parquet, "_SMALL_GROUP", 0 if spooled else 1 << 20)
    monkeypatch.setattr(arrow_batches, "BATCH_BYTES", batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.parquet"
        table = pa.Table.from_pylist([record(i) for i in range(max(count, 1))]).slice(0, count)
        pq.write_table(table, path, row_group_size=group)
        in_any_order(opened(path), expected_of(pq.read_table(path).to_pylist()))


@quick
@given(
    st.integers(0, 60),
    st.integers(1, 70),
    st.sampled_from([ipc.new_file, ipc.new_stream]),
    st.sampled_from([None, "lz4", "zstd"]),
    st.booleans(),
)
def test_arrow(count: int, batch: int, new: Any, compression: Any, dictionaries: bool) -> None:
    table = pa.Table.from_pylist([record(i) for i in range(max(count, 1))]).slice(0, count)
    if dictionaries:
        table = table.set_column(0, "id", table["id"].dictionary_encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.arrow"
        options = ipc.IpcWriteOptions(compression=compression, unify_dictionaries=True)
        with new(path, table.schema, options=options) as writer:
            for part in table.to_batches(max_chunksize=batch):
                writer.write_batch(part)
        in_any_order(opened(path), expected_of(table.to_pylist()))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_large_part_is_read_by_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(spool, "_OWN_PROCESS_BYTES", 0)
    monkeypatch.setattr(parquet, "_SMALL_GROUP", 0)
    started: list[Any] = []
    popen = spool.subprocess.Popen
    monkeypatch.setattr(
        spool.subprocess, "Popen", lambda *a, **k: (started.append(a), popen(*a, **k))[1]
    )
    table = pa.Table.from_pylist([record(i) for i in range(40)])
    path = tmp_path / "d"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(compression="lz4")) as w:
            w.write_table(table)
    in_any_order(opened(path), expected_of(table.to_pylist()))
    assert len(started) == 2  # the first rows' texts, and all of them


def test_a_damaged_row_group_is_an_error_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([record(i) for i in range(40)]), path)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(bytes(data))
    for own_process in (False, True):
        monkeypatch.setattr(spool, "_OWN_PROCESS_BYTES", 0 if own_process else 1 << 30)
        with pytest.raises(InputError, match="d.parquet: it cannot be read"):
            opened(path).read(0)


def test_spools_make_room_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_SMALL_GROUP", 0)
    path = tmp_path / "d.parquet"
    rows = [{"id": str(i), "images": [random.Random(i).randbytes(20_000)]} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    cache = spool.SpoolCache(limit=500_000)  # two groups of four
    records = data_files.open_records(path, cache)
    in_any_order(records, rows)
    assert sum(s.bytes for s in cache._spools.values()) <= 500_000


def test_a_broken_line_costs_its_row_only(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b'{"id": 0}\n{"id": 1\n[1]\n{"id": "\xff"}\n' + b"[" * 100_000 + b'\n{"id": 5}'
    )
    records = opened(path)
    assert len(records) == 6
    for row, problem in ((1, "delimiter"), (2, "list instead of"), (3, "utf-8"), (4, "recursion")):
        with pytest.raises(BadRowError, match=f"broken JSON line: .*{problem}"):
            records.read(row)
    assert records.read(0) == {"id": 0}
    assert records.read(5) == {"id": 5}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, {"a": ]', "byte 17"),
        ('[{"a": 1}, {"a": 2}', "does not end"),
        ('[{"a": 1} {"a": 2}]', "byte 10: a comma"),
        ('[{"a": 1}, ]', "byte 11"),
        ('[{"a": 1}] [', "extra data"),
        ("[" * 100_000, "recursion"),
        ('[{"a": "' + "x" * 1000, "Unterminated"),
    ],
)
def test_a_broken_array_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        opened(path)


def test_a_broken_array_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", 1000)
    path = tmp_path / "d.json"
    path.write_text('[{"a": oops}, ' + '{"a": 1},' * 100_000)
    read = []
    decode = json.JSONDecoder.raw_decode
    monkeypatch.setattr(
        json.JSONDecoder, "raw_decode", lambda s, t, i: (read.append(len(t)), decode(s, t, i))[1]
    )
    with pytest.raises(InputError, match="byte 7"):
        opened(path)
    assert read == [1000]


def test_files_of_a_folder_and_of_a_glob(tmp_path: Path) -> None:
    """Sorted by name, whatever their kind; other files are left out."""
    pq.write_table(pa.Table.from_pylist([{"id": "b0"}, {"id": "b1"}]), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"id": "a0"}\n{"id": "a1"}\n')
    (tmp_path / "c.json").write_text('[{"id": "c0"}]')
    (tmp_path / "README.md").write_text("#")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "d.jsonl").write_text('{"id": "d0"}\n')

    def ids(data: Path) -> list[str]:
        return [
            file.records.read(row)["id"]
            for file in data_files.open_data(data)
            for row in range(len(file.records))
        ]

    assert ids(tmp_path) == ["a0", "a1", "b0", "b1", "c0"]
    assert ids(tmp_path / "[bc].*") == ["b0", "b1", "c0"]
    assert ids(tmp_path / "**" / "*.jsonl") == ["a0", "a1", "d0"]


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet, "_SMALL_GROUP", 0)
    monkeypatch.setattr(spool.Spool, "append", full)
    pq.write_table(pa.Table.from_pylist([record(0)]), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="do not fit into the temporary folder .* set TMPDIR"):
        opened(tmp_path / "d.parquet").read(0)
