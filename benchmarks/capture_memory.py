"""Peak memory of capturing from a small and from a large Parquet file.

    python benchmarks/capture_memory.py --megabytes 20 2000 --picture-kb 1000 --rows-per-group 100

The files hold pictures of few pixels, most of whose bytes are metadata, so that a large file is
captured in little time. Batches are small, so that the small file fills them too. Memory is that
of the capturing process (VmHWM), and that of it, its rendering processes and those that read large
row groups for them together (sampled).
"""

import argparse
import io
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dspark.benchmarks import command

CAPTURE = """
import sys
from pathlib import Path
import dspark
report = dspark.capture(8, data=sys.argv[1], out=sys.argv[2], layers="none", logits="head",
                        batch_tokens=1024)
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(report.manifest.counts.ok, report.manifest.num_samples, peak)
"""


def picture(rng: np.random.Generator, size: int) -> bytes:
    """A PNG of 32 x 32 pixels with a private chunk of noise."""
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
    data = b"prVt" + rng.bytes(size)
    chunk = struct.pack(">I", size) + data + struct.pack(">I", zlib.crc32(data))
    end = buffer.tell() - 12  # before the chunk IEND
    return buffer.getvalue()[:end] + chunk + buffer.getvalue()[end:]


def write(path: Path, megabytes: int, picture_kb: int, rows_per_group: int) -> None:
    """About ``megabytes`` of pictures, every row another one."""
    rng = np.random.default_rng(0)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Noise."}]},
    ]
    schema = pa.Table.from_pylist([{"messages": messages, "images": [{"bytes": b""}]}]).schema
    rows = [
        {"messages": messages, "images": [{"bytes": picture(rng, picture_kb * 1000)}]}
        for _ in range(megabytes * 1000 // picture_kb)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=rows_per_group)


def measure(path: Path, out: Path) -> dict[str, float]:
    """Capture a file; seconds, rows and MB."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", CAPTURE, str(path), str(out)], stdout=subprocess.PIPE, text=True
    )
    together = [0]

    def watch() -> None:
        whole = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                family = [whole, *whole.children(recursive=True)]
                # What forked processes share is counted once.
                together.append(sum(p.memory_full_info().pss for p in family))
            except psutil.Error:
                pass
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = process.communicate()[0]
    watcher.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    ok, rows, peak = map(int, output.split())
    assert ok == rows, output
    return {
        "file MB": path.stat().st_size / 1e6,
        "rows": rows,
        "seconds": time.monotonic() - start,
        "peak MB": peak / 1e3,
        "peak with children MB": max(together) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=command.count, nargs="+", default=[20, 2000])
    parser.add_argument("--picture-kb", type=command.count, default=100)
    parser.add_argument("--rows-per-group", type=command.count, default=1_000_000)
    options = parser.parse_args()
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data.parquet"
            write(path, megabytes, options.picture_kb, options.rows_per_group)
            found = measure(path, Path(folder) / "cache")
            print("  ".join(f"{key} {value:,.0f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    command.run(main)
