"""The sample index of a shard: a Parquet file with one row per sample."""

import io
import math
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from dspark.schemas.commands import repair_command
from dspark.schemas.digest import canonical_json
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.durable import names, write_file
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.plain_parquet import check_plain
from dspark.schemas.strict_json import parse_json

OK = "ok"
SKIPPED = "skipped"

SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("sample", pa.int64()),
            ("row", pa.int32()),
            ("id", pa.string()),
            ("status", pa.string()),
            ("reason", pa.string()),
            ("length", pa.int32()),
            ("image_tokens", pa.int32()),
            ("loss_tokens", pa.int32()),
            ("digests", pa.list_(pa.field("element", pa.uint64(), nullable=False))),
        )
    ]
)
_METADATA_KEY = b"dspark"


@dataclass(frozen=True, slots=True)
class IndexRow:
    """What the index says of one sample.

    Attributes:
        sample: row of the dataset.
        row: row of the shard.
        id: the dataset's own id of the sample, or an empty string.
        status: ``ok`` or ``skipped``. A skipped sample keeps its row, empty.
        reason: why it was skipped, as ``kind: detail``; empty for ``ok``.
        length: stored tokens.
        image_tokens: positions filled by a picture.
        loss_tokens: supervised positions.
        digests: of each stored field's real bytes (see ``digest.field_digest``), in the manifest's
            order; empty for ``skipped``.
    """

    sample: int
    row: int
    id: str
    status: str
    reason: str = ""
    length: int = 0
    image_tokens: int = 0
    loss_tokens: int = 0
    digests: tuple[int, ...] = ()


def write_index(path: Path, rows: Sequence[IndexRow], facts: dict[str, Any]) -> None:
    """Write the index durably and atomically: this commits the shard.

    Args:
        path: the final name.
        rows: one entry per sample, in shard order.
        facts: ``head_error`` and ``identity`` of the shard, kept as JSON in the Parquet schema.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    table = pa.Table.from_pydict(columns, schema=SCHEMA)
    write_file(path, index_bytes(table, facts))


def index_bytes(table: pa.Table, facts: dict[str, Any]) -> bytes:
    """The file of an index.

    It has neither compression nor dictionaries, so that what it decodes to is never much larger
    than the file, and no statistics, which nothing reads.

    Args:
        table: with the columns of ``SCHEMA``.
        facts: as for ``write_index``.
    """
    facts = {**facts, "content": _content(table, facts)}
    buffer = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({_METADATA_KEY: canonical_json(facts)}),
        buffer,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    return buffer.getvalue()


def index_identity(path: Path) -> str | None:
    """The identity hash that an index carries; None if it is missing or damaged.

    Raises:
        OSError: it cannot be read, so it may be sound.
    """
    try:
        with names(path):
            _check_regular(path)
            with open(path, "rb") as data, _open(data) as file:
                identity: str | None = _facts(file)["identity"]
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and is_unreadable(error):
            raise
        return None
    return identity


def read_index(
    paths: CachePaths, manifest: Manifest, shard: int
) -> tuple[pa.Table, dict[str, Any]]:
    """The index of a shard: a table with the columns of ``SCHEMA``, and the shard's facts.

    Paths and manifest may be those of any part of a cache (see ``parts``).

    The file is taken for hostile: it is decoded only if it declares the manifest's number of rows
    and about its own size, and each row is checked against what the manifest allows.

    Raises:
        IncompatibleCacheError: there is no index, it is damaged, or it belongs to another capture.
        UnreadableError: the system does not let it be read.
    """
    path = paths.index(shard)
    again = "the capture with --extend again" if paths.part else "the capture again"
    way_out = f"run '{repair_command(paths.root)}' and {again}, which redoes this shard alone"
    try:
        _check_regular(path)
        data = path.read_bytes()
        check_plain(data, len(manifest.rows_of(shard)), most_values=len(manifest.fields))
        with _open(pa.BufferReader(data)) as file:
            facts = _facts(file)
            if facts["identity"] != manifest.identity_hash:
                raise IncompatibleCacheError(
                    f"{path}: it belongs to a capture with other settings than the manifest's; "
                    f"{way_out}"
                )
            table = file.read(use_threads=False)  # there is too little to share
        table.validate(full=True)
        if facts.pop("content") != _content(table, facts):
            raise ValueError("its content does not have the digest that it names")
        _check_rows(table, manifest, shard)
    except FileNotFoundError:
        raise IncompatibleCacheError(
            f"{path}: this sample index is missing, so its shard does not exist; run {again}, "
            "which redoes this shard alone"
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and is_unreadable(error):
            raise UnreadableError(path, error) from None
        raise IncompatibleCacheError(
            f"{path}: no sound sample index ({error}); {way_out}"
        ) from None
    return table, facts


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a file")


def _open(source: BinaryIO | pa.BufferReader) -> pq.ParquetFile:
    """Raises ValueError if it is not an index, or what pyarrow raises if it is not Parquet."""
    file = pq.ParquetFile(source)
    if not file.schema_arrow.remove_metadata().equals(SCHEMA):
        raise ValueError("its columns are not those of a sample index")
    return file


def _facts(file: pq.ParquetFile) -> dict[str, Any]:
    facts = parse_json((file.schema_arrow.metadata or {}).get(_METADATA_KEY, b"null"))
    if not isinstance(facts, dict) or set(facts) != {"content", "head_error", "identity"}:
        raise ValueError("its metadata are not those of a sample index")
    error = facts["head_error"]
    if not (
        all(
            isinstance(facts[name], str) and re.fullmatch(r"[0-9a-f]{16}", facts[name])
            for name in ("content", "identity")
        )
        and (error is None or (type(error) is float and 0 <= error < math.inf))
    ):
        raise ValueError("its metadata are not those of a sample index")
    return facts


def _content(table: pa.Table, facts: dict[str, Any]) -> str:
    """xxh3-64 (hex) of the decoded content, whatever the file's layout.

    Hashed are the canonical JSON of the facts, then each column: numbers as they are, in little
    endian; of text and lists first the lengths (int32; UTF-8 bytes or items), then all values.
    """
    state = xxhash.xxh3_64(canonical_json(facts))
    for name in SCHEMA.names:
        column = table[name].combine_chunks()
        if pa.types.is_string(column.type):
            state.update(pc.binary_length(column).to_numpy().astype("<i4"))
            state.update("".join(column.to_pylist()).encode())
            continue
        if pa.types.is_list(column.type):
            state.update(pc.list_value_length(column).to_numpy().astype("<i4"))
            column = column.flatten()
        values = column.to_numpy()
        state.update(values.astype(values.dtype.newbyteorder("<")))
    return state.hexdigest()


def _check_rows(table: pa.Table, manifest: Manifest, shard: int) -> None:
    """Check each row against the manifest.

    Raises:
        ValueError: a row cannot be.
    """
    samples = manifest.rows_of(shard)
    if not np.array_equal(table["sample"], np.arange(samples.start, samples.stop)):
        raise ValueError(f"it does not list dataset rows {samples.start} to {samples.stop - 1}")
    if not np.array_equal(table["row"], np.arange(len(samples))):
        raise ValueError("it does not list the rows of the shard in order")
    ok = pc.equal(table["status"], OK).to_numpy()
    if not (ok | pc.equal(table["status"], SKIPPED).to_numpy()).all():
        raise ValueError(f"a row's status is neither {OK} nor {SKIPPED}")
    length = table["length"].to_numpy()
    for name, least, most in (
        ("length", 1, manifest.max_length),
        ("image_tokens", 0, length),
        ("loss_tokens", 0, length),
    ):
        counts = table[name].to_numpy()
        if (np.where(ok, (counts < least) | (counts > most), counts != 0)).any():
            raise ValueError(f"a row's {name} is not what a row can have")
    digests = pc.list_value_length(table["digests"]).to_numpy()
    if (digests != np.where(ok, len(manifest.fields), 0)).any():
        raise ValueError("a row does not have a digest for each field")
