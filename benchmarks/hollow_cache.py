"""Caches of any size whose rows are holes: their files take hardly any disk."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from dspark.schemas.columns import NAMES, write_columns
from dspark.schemas.digest import field_digest, file_digest
from dspark.schemas.fields import build_fields
from dspark.schemas.index import OK, SCHEMA, index_bytes
from dspark.schemas.manifest import Counts, Manifest, TargetFacts, write_manifest
from dspark.schemas.paths import CachePaths, head_path
from dspark.schemas.shard_layout import ShardLayout

MAX_LENGTH = 256
_HIDDEN, _VOCAB = 32, 64
_MOST_ROWS = 1 << 20
"""Rows whose columns are made at a time."""


def write_hollow_cache(root: Path, rows: int, shards: int, *, bare: bool = False) -> None:
    """Write a finished cache whose rows have random lengths and are all zeros.

    Args:
        root: an empty or new folder.
        rows: M.
        shards: N, at most M.
        bare: write what a cache is opened with, and neither shards nor indexes.
    """
    manifest = _manifest(rows, shards, root)
    paths = CachePaths(root, manifest.num_shards)
    paths.index(0).parent.mkdir(parents=True, exist_ok=True)
    tables = map(_columns, _ranges(rows)) if bare else _write_shards(manifest, paths)
    sums = dict.fromkeys(NAMES, 0)

    def counted() -> Iterator[pa.Table]:
        for table in tables:
            for name in NAMES:
                sums[name] += int(table[name].to_numpy().sum(dtype=np.int64))
            yield table

    columns = write_columns(root, rows, counted())
    counts = Counts(rows, {}, sums["length"], sums["image_tokens"], sums["loss_tokens"])
    write_manifest(root, manifest.finished(counts, None, columns))


def _ranges(rows: int) -> Iterator[range]:
    return (range(i, min(i + _MOST_ROWS, rows)) for i in range(0, rows, _MOST_ROWS))


def _columns(rows: range) -> pa.Table:
    """Lengths and counts of dataset rows; each depends on the row's number alone."""
    draws = (np.arange(rows.start, rows.stop) * 2654435761) % 2**32
    length = (1 + draws % MAX_LENGTH).astype(np.int32)
    return pa.table(
        {
            "length": length,
            "image_tokens": length // 4 * (draws % 3 > 0),
            "loss_tokens": length // 2,
        }
    )


def _write_shards(manifest: Manifest, paths: CachePaths) -> Iterator[pa.Table]:
    """Write shards and indexes, each index as it comes."""
    paths.shard(0).parent.mkdir(parents=True, exist_ok=True)
    layout = ShardLayout(manifest.fields, manifest.rows_per_shard)
    digests = np.array(
        [
            [field_digest(bytes(length * field.token_bytes)) for field in manifest.fields]
            for length in range(MAX_LENGTH + 1)
        ],
        np.uint64,
    )
    facts = {"head_error": None, "identity": manifest.identity_hash}
    for shard in range(manifest.num_shards):
        rows = manifest.rows_of(shard)
        columns = _columns(rows)
        of_rows = digests[columns["length"].to_numpy()]
        ends = np.arange(0, of_rows.size + 1, len(manifest.fields), dtype=np.int32)
        sample = pa.array(np.arange(rows.start, rows.stop))
        table = pa.table(
            {
                "sample": sample,
                "row": pa.array(np.arange(len(rows), dtype=np.int32)),
                "id": sample.cast(pa.string()),
                "status": [OK] * len(rows),
                "reason": [""] * len(rows),
                **{name: columns[name].cast(pa.int32()) for name in NAMES},
                "digests": pa.ListArray.from_arrays(
                    ends, of_rows.reshape(-1), type=SCHEMA.field("digests").type
                ),
            },
            schema=SCHEMA,
        )
        paths.index(shard).write_bytes(index_bytes(table, facts))
        with open(paths.shard(shard), "wb", buffering=0) as file:
            file.write(layout.header)
            os.truncate(file.fileno(), layout.file_size)
        yield table


def _manifest(rows: int, shards: int, root: Path) -> Manifest:
    fields = build_fields(
        max_length=MAX_LENGTH,
        hidden_size=_HIDDEN,
        vocab_size=_VOCAB,
        layers=(0, 1),
        dtype="bf16",
        logits="head",
        position_rows=1,
    )
    per_shard = -(-rows // shards)
    head = head_path(root)
    head.parent.mkdir(parents=True, exist_ok=True)
    weights = {"embed_tokens.weight": torch.zeros(_VOCAB, _HIDDEN)}
    save_file(weights | {"lm_head.weight": torch.zeros(_VOCAB, _HIDDEN)}, head)
    return Manifest(
        identity={"target": "hollow", "rows": rows},
        target=TargetFacts(
            id="hollow",
            revision="",
            architecture="Hollow",
            model_type="hollow",
            text_model_type="hollow",
            num_layers=4,
            hidden_size=_HIDDEN,
            vocab_size=_VOCAB,
            embedding_rows=_VOCAB,
            image_token_id=_VOCAB - 1,
            video_token_id=None,
            eos_token_ids=[0],
            pad_token_id=0,
            text={},
        ),
        data="hollow",
        num_samples=rows,
        rows_per_shard=per_shard,
        num_shards=shards,
        max_length=MAX_LENGTH,
        dtype="bf16",
        fields=tuple(fields),
        layers=(0, 1),
        logits="head",
        versions={},
        shard_bytes=ShardLayout(fields, per_shard).file_size,
        target_files={head.name: file_digest(head)},
    )
