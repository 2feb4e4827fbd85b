"""Small record batches out of a large Parquet row group or Arrow batch.

Also a program that imports nothing else of the package: ``arrow_batches.py KIND PATH PART COLUMNS``
writes the batches to stdout as an Arrow stream. A page of Parquet and a compressed batch of Arrow
IPC are decompressed whole whatever is asked of them, so a large part is read in a process of its
own, which gives its memory back when it ends.
"""

import json
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

BATCH_BYTES = 4 << 20
PARQUET = "parquet"
IPC_FILE = "ipc file"
IPC_STREAM = "ipc stream"


def small_batches(kind: str, path: str, part: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of one part of a file, in batches of about 4 MiB.

    Args:
        kind: ``PARQUET``, ``IPC_FILE`` or ``IPC_STREAM``.
        path: of the file.
        part: row group, record batch, or 0 for the whole stream.
        columns: to read.
    """
    if kind == PARQUET:
        # Without a buffered stream a whole column chunk is read at once.
        with pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            group = file.metadata.row_group(part)
            rows = max(1, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
            yield from file.iter_batches(
                rows, row_groups=[part], columns=columns, use_threads=False
            )
        return
    with pa.memory_map(path) as source:
        if kind == IPC_FILE:
            batches = iter([ipc.open_file(source).get_batch(part)])
        else:
            batches = iter(ipc.open_stream(source))
        for batch in batches:
            batch = batch.select(columns)
            rows = max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def main(kind: str, path: str, part: str, columns: str) -> None:
    writer = None
    for batch in small_batches(kind, path, int(part), json.loads(columns)):
        writer = writer or ipc.new_stream(sys.stdout.buffer, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
