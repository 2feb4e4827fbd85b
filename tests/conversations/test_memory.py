"""Reading a file of 150 MB, whatever its kind, takes far less memory than it has bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

ROWS, PICTURE = 1500, 100_000
LIMIT = 75  # MB

READ_ALL = """
import sys
from pathlib import Path
from dspark.capture.conversations.data_files import open_data

def peak():
    status = Path("/proc/self/status").read_text()  # ru_maxrss would start with the parent's
    return int(status.split("VmHWM:")[1].split()[0]) // 1000

start = peak()
for path in sys.argv[1:]:
    records = open_data(Path(path))[0].records
    assert len(records) == 1500
    size = sum(len(records.read(i)["images"][0]["bytes"]) for i in range(len(records)))
    assert size == 150_000_000
    print(path.rsplit(".")[-1], peak() - start)
"""


def test_one_huge_row_group_and_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    table = pa.table(
        {
            "messages": [messages] * ROWS,
            "images": [[{"bytes": rng.bytes(PICTURE)}] for _ in range(ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    assert pq.ParquetFile(tmp_path / "d.parquet").num_row_groups == 1
    with ipc.new_stream(tmp_path / "d.arrow", table.schema) as writer:
        writer.write_table(table)
    text = json.dumps({"messages": messages, "images": [{"bytes": "x" * PICTURE}]})
    with open(tmp_path / "d.jsonl", "w") as lines, open(tmp_path / "d.json", "w") as array:
        for i in range(ROWS):
            lines.write(text + "\n")
            array.write((",\n" if i else "[") + text)
        array.write("]")
    (tmp_path / "temporary").mkdir()
    paths = [str(tmp_path / f"d.{kind}") for kind in ("parquet", "arrow", "jsonl", "json")]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    grown = {kind: int(size) for kind, size in map(str.split, done.stdout.splitlines())}
    assert len(grown) == 4
    assert max(grown.values()) < LIMIT, grown
    assert list((tmp_path / "temporary").iterdir()) == [], "a temporary file of rows stayed"
    for path in paths:
        Path(path).unlink()
