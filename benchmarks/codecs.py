"""Size and speed of the zarr form by codec, level and chunk length, beside safetensors.

    python -m benchmarks.codecs [--json codecs.json]

Two kinds of features: those of the bundled target, captured here, and random-normal bfloat16 of a
realistic width. First, codecs alone, on chunks in memory: those that ``dspark convert`` offers and
others. Then whole shards on disk, by chunk length: written durably from a safetensors shard, as
``dspark convert`` does, and read row by row in random order from the page cache. One thread; all
rates are bytes of real tokens before compression.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numcodecs
import numpy as np

import dspark
from dspark.benchmarks import command
from dspark.benchmarks.result import Measurement, Result
from dspark.schemas.copy_shard import write_safetensors, write_zarr
from dspark.schemas.digest import field_digest
from dspark.schemas.dtypes import ITEMSIZE
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.safetensors_shard import SafetensorsShard
from dspark.schemas.shard_format import ShardFormat
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import RowBytes, stored_rows
from dspark.schemas.stored_shard import StoredShard
from dspark.schemas.zarr_codec import ChunkCodec
from dspark.schemas.zarr_layout import CHUNK_TOKENS, ZarrLayout
from dspark.schemas.zarr_shard import ZarrShard

BLOCK = 512
WIDTH = 1536
LENGTH = 2048
MEAN_LENGTH = 671
OFFERED = (
    ("zstd", 1),
    ("zstd", 3),
    ("zstd", 9),
    ("lz4", 1),
    ("lz4", 5),
    ("lz4", 9),
    ("none", None),
)
SHUFFLES = {"shuffle": numcodecs.Blosc.SHUFFLE, "bitshuffle": numcodecs.Blosc.BITSHUFFLE}
ON_DISK = (("zstd", 1), ("zstd", 3), ("lz4", 5), ("none", None))
CHUNKS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Features:
    """A safetensors shard.

    Attributes:
        name: of its features.
        part: manifest with its fields and S.
        path: of the file.
        rows: that hold a sample.
    """

    name: str
    part: Manifest
    path: Path
    rows: Sequence[RowBytes]

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.part.fields, self.part.rows_per_shard)

    @property
    def real_bytes(self) -> int:
        """Bytes of real tokens."""
        return sum(
            row.length * field.token_bytes for row in self.rows for field in self.part.fields
        )

    def chunks(self, field: Field, most: int) -> Iterator[tuple[np.ndarray, int]]:
        """Some chunks of a field, padded as in the zarr form, each with its real bytes."""
        array = ZarrLayout([field], 1, ShardFormat.zarr()).arrays[field.name]
        with SafetensorsShard(self.path, self.layout) as shard:
            for row in self.rows:
                data = bytearray(row.length * field.token_bytes)
                shard.read_into(field, row.row, row.length, [memoryview(data)])
                for start in range(0, len(data), array.chunk_bytes):
                    chunk = np.zeros(array.chunk_bytes, np.uint8)
                    real = np.frombuffer(data, np.uint8)[start : start + chunk.size]
                    chunk[: real.size] = real
                    most -= real.size
                    yield chunk, real.size
                    if most <= 0:
                        return


def captured(folder: Path, rows: int) -> Features:
    """Features of the bundled target."""
    dspark.capture(1, out=str(folder / "bundled"), limit=rows)
    manifest = read_manifest(folder / "bundled")
    paths = CachePaths(folder / "bundled", 1)
    found = stored_rows(paths, manifest, 0)
    return Features("bundled target", manifest, paths.shard(0), found)


def random_normal(folder: Path, like: Manifest, megabytes: int) -> Features:
    """Random-normal bfloat16 of width ``WIDTH``, in rows of ``MEAN_LENGTH`` tokens in the mean."""
    field = Field("hidden_states.0", "BF16", (LENGTH, WIDTH))
    count = max(2, megabytes * 10**6 // (MEAN_LENGTH * field.token_bytes))
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(2, MEAN_LENGTH / 2, count), 16, LENGTH).astype(int)
    part = replace(like, fields=(field,), rows_per_shard=count)
    layout = ShardLayout(part.fields, count)
    path = folder / "random.safetensors"
    rows = []
    with FileIO(path, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_size)
        for row, length in enumerate(lengths.tolist()):
            bits = rng.standard_normal((length, WIDTH), np.float32).view(np.uint32)
            data = (bits >> 16).astype("<u2").tobytes()
            ((offset, _),) = layout.row_extents(field, row, length)
            file.seek(offset)
            file.write(data)
            rows.append(RowBytes(row, row, length, [field_digest(data)]))
    return Features(f"random normal, {WIDTH} wide", part, path, rows)


@dataclass
class Rates:
    """What is measured of one thing, once in each repetition."""

    size: list[float]
    write: list[float]
    read: list[float]


Pack = Callable[[np.ndarray], bytes]
Unpack = Callable[[bytes, np.ndarray], object]


def codecs_in_memory(field: Field) -> dict[str, tuple[Pack, Unpack]]:
    """Encoder and decoder of whole chunks by name."""
    found: dict[str, tuple[Pack, Unpack]] = {}
    for codec, level in OFFERED:
        form = ShardFormat.zarr(codec, level)
        chunk_codec = ChunkCodec(ZarrLayout([field], 1, form).arrays[field.name])
        found[f"--codec {codec}" + (f" --level {level}" if level else "")] = (
            chunk_codec.encode,
            chunk_codec.decode,
        )
    kind = f"u{ITEMSIZE[field.dtype]}"
    for shuffle, number in SHUFFLES.items():
        for name, level in (("zstd", 1), ("zstd", 3), ("lz4", 5)):
            if (name, shuffle) == ("lz4", "bitshuffle"):
                continue  # that is --codec lz4
            blosc = numcodecs.Blosc(name, level, number)
            found[f"blosc {name} {level}, {shuffle}"] = (
                lambda chunk, blosc=blosc: bytes(blosc.encode(chunk.view(kind))),  # type: ignore
                blosc.decode,
            )
    return found


def measure_codecs(features: Features, megabytes: int, repeat: int) -> dict[str, Rates]:
    """Codecs alone, on chunks of the first wide field."""
    field = features.part.fields[0]
    found = list(features.chunks(field, megabytes * 10**6))
    chunks = [chunk for chunk, _ in found]
    total = sum(real for _, real in found)
    codecs = codecs_in_memory(field)
    rates = {name: Rates([], [], []) for name in codecs}
    out = np.empty(chunks[0].size, np.uint8)
    for _ in range(repeat):
        for name, (encode, decode) in codecs.items():
            start = time.perf_counter()
            packed = [encode(chunk) for chunk in chunks]
            written = time.perf_counter()
            for data in packed:
                decode(data, out)
            end = time.perf_counter()
            assert np.array_equal(out, chunks[-1])
            rates[name].size.append(sum(map(len, packed)) / total)
            rates[name].write.append(total / (written - start) / 1e9)
            rates[name].read.append(total / (end - written) / 1e9)
    return rates


def measure_shards(features: Features, folder: Path, repeat: int) -> dict[str, Rates]:
    """Whole shards on disk; the first is the safetensors form."""
    forms: list[tuple[str, ZarrLayout | None]] = [("safetensors", None)]
    part = features.part
    for codec, level in ON_DISK:
        for chunk in CHUNKS if (codec, level) in (ON_DISK[0], ON_DISK[-1]) else (CHUNK_TOKENS,):
            form = ShardFormat.zarr(codec, level)
            of_zarr = ZarrLayout(part.fields, part.rows_per_shard, form, chunk)
            tokens = of_zarr.arrays[part.fields[0].name].chunk_tokens
            forms.append((f"{form}, chunks of {tokens} tokens", of_zarr))
    forms = list({name: (name, layout) for name, layout in forms}.values())
    rates = {name: Rates([], [], []) for name, _ in forms}
    for _ in range(repeat):
        for name, layout in forms:
            to = folder / "copy"
            start = time.perf_counter()
            with SafetensorsShard(features.path, features.layout) as source:
                if layout is None:
                    with FileIO(to, "w") as file:
                        write_safetensors(file, features.layout, source, part, features.rows)
                        os.fsync(file.fileno())
                else:
                    write_zarr(to, layout, source, part, features.rows)
            written = time.perf_counter()
            shard: StoredShard = (
                SafetensorsShard(to, features.layout) if layout is None else ZarrShard(to, layout)
            )
            begin = time.perf_counter()
            with shard:
                read_all(shard, features)
            end = time.perf_counter()
            files = [to] if layout is None else [p for p in to.rglob("*") if p.is_file()]
            stored = sum(path.stat().st_blocks * BLOCK for path in files)
            rates[name].size.append(stored / features.real_bytes)
            rates[name].write.append(features.real_bytes / (written - start) / 1e9)
            rates[name].read.append(features.real_bytes / (end - begin) / 1e9)
            to.unlink() if layout is None else shutil.rmtree(to)
    return rates


def read_all(shard: StoredShard, features: Features) -> None:
    """Read all fields of all rows in random order into one buffer."""
    longest = max(row.length for row in features.rows)
    most = max(field.token_bytes for field in features.part.fields) * longest
    buffer = memoryview(bytearray(most))
    order = np.random.default_rng(1).permutation(len(features.rows))
    for place in order.tolist():
        row = features.rows[place]
        for field in features.part.fields:
            runs, start = [], 0
            for _, size in field.extents(row.length):
                runs.append(buffer[start : start + size])
                start += size
            shard.read_into(field, row.row, row.length, runs)


def add(result: Result, what: str, rates: dict[str, Rates]) -> None:
    """Three tables: size, encoding or writing, decoding or reading."""
    in_memory = what.startswith("chunks")
    for title, unit, values in (
        ("size", "of real bytes", lambda r: r.size),
        ("encode" if in_memory else "write", "GB/s", lambda r: r.write),
        ("decode" if in_memory else "read", "GB/s", lambda r: r.read),
    ):
        for name, found in rates.items():
            result.measurements.append(Measurement(name, unit, values(found), f"{what}: {title}"))


def run(folder: Path, options: argparse.Namespace) -> Result:
    parameters = {
        "rows of the bundled target": options.rows,
        "random-normal MB": options.megabytes,
        "repeat": options.repeat,
    }
    result = Result("codecs", parameters)
    bundled = captured(folder, options.rows)
    for features in (bundled, random_normal(folder, bundled.part, options.megabytes)):
        in_memory = measure_codecs(features, options.megabytes // 4 + 1, options.repeat)
        add(result, f"chunks, {features.name}", in_memory)
        add(result, f"shard, {features.name}", measure_shards(features, folder, options.repeat))
    result.notes.append(
        "safetensors is written from a safetensors shard as well: each write includes reading the "
        "rows and comparing them with their digests; sizes of shards are those on disk, of blocks."
    )
    return result


def main() -> None:
    parser = command.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=command.count, default=300, help="of the bundled target")
    parser.add_argument(
        "--megabytes", type=command.count, default=100, help="of random-normal features"
    )
    parser.add_argument("--repeat", type=command.count, default=3)
    options = parser.parse_args()
    if options.small:
        options.rows, options.megabytes, options.repeat = 12, 4, 1
    folder = Path(tempfile.mkdtemp(prefix="codecs-"))
    try:
        run(folder, options).report(folder, options.json)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    command.run(main)
