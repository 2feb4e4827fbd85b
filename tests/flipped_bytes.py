"""Single bytes of a cache flipped: does ``verify --deep`` see it, and does it change a meaning?

What a file means is decoded here with the libraries of its format, not with dspark.
"""

import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from conversation_data import mixed_rows, row, text, user, write_rows
from safetensors import safe_open

import dspark
from dspark.schemas.errors import IncompatibleCacheError
from dspark.verify.faults import Fault


@dataclass(frozen=True)
class Flip:
    """Attributes:
    file: path inside the cache.
    place: kind of file and, in a shard, what the byte belongs to.
    found: whether ``verify --deep`` does not call the cache sound.
    named: whether its first fault names the file and, where the byte is a row's, row and field.
    harmless: whether the file decodes to what it decoded to before.
    """

    file: str
    place: str
    found: bool
    named: bool
    harmless: bool


def capture_small(folder: Path, target: Path, logits: str, rows: int = 24) -> Path:
    """A real cache of three shards: pictures, several turns, two skipped rows, padding."""
    conversations = mixed_rows(rows)
    conversations[5] = row(5, [user(text("Hi"))])
    conversations[11] = row(11, [user(text("x" * 600))])
    data = write_rows(folder / f"{logits}.parquet", conversations)
    out = folder / logits.replace(":", "-")
    dspark.capture(
        3,
        target=str(target),
        data=str(data),
        out=str(out),
        logits=logits,
        max_length=256,
        batch_tokens=600,
        max_skipped=0.5,
    )
    return out


def flips(caches: Sequence[Path], count: int, seed: int) -> Iterator[Flip]:
    """Flip random bytes one at a time. Every other byte is drawn from a file drawn first, so that
    small files get their share; the others from all bytes."""
    rng = random.Random(seed)
    files = [(c, p) for c in caches for p in sorted(c.rglob("*")) if p.is_file()]
    sizes = [p.stat().st_size for _, p in files]
    before = {p: meaning(c, p) for c, p in files}
    for i in range(count):
        cache, path = rng.choice(files) if i % 2 else rng.choices(files, sizes)[0]
        offset = rng.randrange(path.stat().st_size)
        mask = rng.randrange(1, 256)
        place, sample, field = _place(cache, path, offset)
        xor_byte(path, offset, mask)
        try:
            fault = first_fault(cache)
            harmless = meaning(cache, path) == before[path]
        finally:
            xor_byte(path, offset, mask)
        file = str(path.relative_to(cache))
        named = fault is not None and fault.file == file
        named &= fault is not None and (fault.sample, fault.field) == (sample, field)
        yield Flip(file, place, fault is not None, named, harmless)


def first_fault(cache: Path) -> Fault | None:
    """What ``verify --deep`` says first, or None if the cache is sound for it."""
    try:
        found = dspark.verify_cache(cache, deep=True)
    except IncompatibleCacheError as error:
        return Fault("manifest.json", str(error))
    assert bool(found.faults) == (found.exit_code != 0)
    return found.faults[0] if found.faults else None


def meaning(cache: Path, path: Path) -> Any:
    """What a file of a cache decodes to; None if it does not decode."""
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            facts = json.loads(table.schema.metadata[b"dspark"])
            return facts, table.schema.remove_metadata(), table.to_pylist()
        if path.name == "manifest.json":
            return json.loads(path.read_bytes())
        if path.parent.name == "shards":
            return _real_rows(cache, path)
        return path.read_bytes()
    except Exception:  # each library has its own errors
        return None


def _real_rows(cache: Path, path: Path) -> Any:
    """Names, types, shapes and the bytes of real tokens."""
    lengths = [r["length"] for r in pq.read_table(_index(cache, path)).to_pylist()]
    decoded = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dict)
            tensor = file.get_tensor(name)
            axis = 2 if name == "position_ids" and tensor.ndim == 3 else 1
            rows = [tensor[i].narrow(axis - 1, 0, n).tolist() for i, n in enumerate(lengths)]
            decoded[name] = (tensor.dtype, tensor.shape, rows)
    return file.metadata(), decoded


def _place(cache: Path, path: Path, offset: int) -> tuple[str, int | None, str | None]:
    """What a byte belongs to: its kind, and its dataset row and field if it is a real token's."""
    if path.name in ("manifest.json", "columns.safetensors"):
        return path.name, None, None
    if path.parent.name != "shards":
        return path.parent.name, None, None
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    if offset < 8 + size:
        return "shards: header", None, None
    at = offset - 8 - size
    rows = pq.read_table(_index(cache, path)).to_pylist()
    for name, entry in header.items():
        if name != "__metadata__" and at < entry["data_offsets"][1]:
            begin, end = entry["data_offsets"]
            count, *shape = entry["shape"]
            row, byte = divmod(at - begin, (end - begin) // count)
            axis_rows = shape[0] if name == "position_ids" and len(shape) == 2 else 1
            per_token = (end - begin) // count // axis_rows // shape[axis_rows > 1]
            token = byte % (per_token * shape[axis_rows > 1]) // per_token
            if row < len(rows) and token < rows[row]["length"]:
                return "shards: real tokens", rows[row]["sample"], name
            return "shards: padding", None, None
    raise AssertionError(offset)


def _index(cache: Path, shard: Path) -> Path:
    return cache / "index" / f"{shard.stem}.parquet"


def xor_byte(path: Path, offset: int, mask: int) -> None:
    """Change a byte of a file in place; twice, and it is as before."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
