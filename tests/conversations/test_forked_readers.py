"""Forked processes read at the same time what their parent has opened, and has read of before."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from conversation_data import SCHEMA, mixed_rows

from dspark.capture.conversations import open_conversations, parquet, spool
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.rendering.pool import RenderingPool
from dspark.capture.settings import RowOptions
from dspark.capture.targets.loading import load_processor

ROWS = 24


@pytest.mark.parametrize("kind", ["parquet", "parquet, own process", "arrow", "stream", "jsonl"])
def test_rows_are_those_of_one_process(
    tiny_target: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    rows = mixed_rows(ROWS)
    path = tmp_path / "d"
    if kind.startswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=9)
        monkeypatch.setattr(parquet, "_SMALL_GROUP", 0)
        if "own" in kind:
            monkeypatch.setattr(spool, "_OWN_PROCESS_BYTES", 0)
    elif kind == "jsonl":
        texts = [row for row in rows if not row["images"]]
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in texts * 3))
    else:
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        new = ipc.new_file if kind == "arrow" else ipc.new_stream
        with new(path, SCHEMA) as writer:
            writer.write_table(table, max_chunksize=9)
    conversations = open_conversations(path, readers=3)
    processor = load_processor(str(tiny_target("llava")))
    options = RowOptions()
    expected = []
    with RenderingPool(0, conversations, processor) as pool:
        for sample in range(ROWS):
            expected += pool.encode([sample], 512, options)()
        batch = [row for row in expected[:5] if isinstance(row, EncodedRow)]
        (alone,) = pool.batch(batch, fake_image=False)()
    assert len(batch) == 5
    with RenderingPool(3, conversations, processor) as pool:
        tasks = [pool.encode([sample], 512, options) for sample in [*range(ROWS)] * 3]
        batches = [pool.batch(batch, fake_image=False) for _ in range(3)]
        assert [row for task in tasks for row in task()] == expected * 3
        for task in batches:
            (made,) = task()
            assert made.rows == alone.rows
            assert made.tensors.keys() == alone.tensors.keys()
            assert all(v.equal(made.tensors[k]) for k, v in alone.tensors.items())
