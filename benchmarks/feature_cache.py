"""A finished cache of random features, as wide as those of a real target, for benchmarks."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dspark.schemas.columns import write_columns
from dspark.schemas.digest import field_digest, file_digest
from dspark.schemas.draft_layers import draft_layers
from dspark.schemas.fields import MASKS, Field, build_fields
from dspark.schemas.index import OK, IndexRow, read_index, write_index
from dspark.schemas.manifest import Counts, Manifest, TargetFacts, write_manifest
from dspark.schemas.paths import CachePaths, head_path
from dspark.schemas.shard_layout import ShardLayout

NUM_LAYERS = 28


def draw_lengths(rows: int, max_length: int, mean: float, seed: int = 0) -> list[int]:
    """Tokens of rows, spread as those of conversations are: many short ones, few long ones.

    Args:
        rows: how many.
        max_length: most tokens of a row.
        mean: of them all, about.
        seed: of the draw.
    """
    drawn = np.random.default_rng(seed).gamma(2.0, mean / 2, 2 * rows)
    fitting = drawn[(drawn >= 16) & (drawn <= max_length)][:rows]
    scaled = fitting * mean / fitting.mean()
    return [int(x) for x in np.clip(scaled, 16, max_length)]


def write_feature_cache(
    root: Path,
    lengths: Sequence[int],
    *,
    shards: int,
    max_length: int,
    hidden_size: int,
    vocab_size: int,
) -> Path:
    """Write a cache of what the ``dspark`` draft reads of a target of 28 layers, in bfloat16.

    Args:
        root: its directory.
        lengths: tokens of each row.
        shards: N.
        max_length: T.
        hidden_size: H.
        vocab_size: V; no logits are stored.

    Returns:
        ``root``.
    """
    layers = draft_layers(["dspark"], NUM_LAYERS)
    fields = build_fields(
        max_length=max_length,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=layers,
        dtype="bf16",
        logits="head",
        position_rows=1,
    )
    per_shard = -(-len(lengths) // shards)
    layout = ShardLayout(fields, per_shard)
    paths = CachePaths(root, shards)
    for path in (paths.shard(0), paths.index(0), head_path(root)):
        path.parent.mkdir(parents=True, exist_ok=True)
    numbers = torch.Generator().manual_seed(0)
    table = torch.randn(vocab_size, hidden_size, generator=numbers).to(torch.bfloat16)
    save_file(
        {"embed_tokens.weight": table, "lm_head.weight": table / hidden_size**0.5},
        head_path(root),
    )
    manifest = Manifest(
        identity={"target": "random"},
        target=_target(hidden_size, vocab_size),
        data="random",
        num_samples=len(lengths),
        rows_per_shard=per_shard,
        num_shards=shards,
        max_length=max_length,
        dtype="bf16",
        fields=tuple(fields),
        layers=tuple(layers),
        logits="head",
        versions={},
        shard_bytes=layout.file_size,
        target_files={head_path(root).name: file_digest(head_path(root))},
    )
    # One row of random floats and one of ids, from which all rows are cut.
    size = 2 * max_length
    floats = torch.randn(size, hidden_size, generator=numbers).to(torch.bfloat16)
    ids = torch.randint(1, vocab_size, (size,), generator=numbers, dtype=torch.int32)
    data = {"float": _bytes(floats), "I32": _bytes(ids), "U8": b"\1" * size}
    supervised = 0
    for shard in range(shards):
        index = []
        with open(paths.shard(shard), "wb") as file:
            file.write(layout.header)
            file.truncate(layout.file_size)
            for row, sample in enumerate(manifest.rows_of(shard)):
                length = lengths[sample]
                digests = []
                for i, field in enumerate(fields):
                    run = _run(field, data, length, (37 * sample + 101 * i) % (size - max_length))
                    digests.append(field_digest(run))
                    ((offset, _),) = layout.row_extents(field, row, length)
                    os.pwrite(file.fileno(), run, offset)
                loss = length - _prompt(length)
                supervised += loss
                index.append(
                    IndexRow(
                        sample, row, "", OK, "", length, image_tokens=0, loss_tokens=loss,
                        digests=tuple(digests),
                    )
                )  # fmt: skip
            os.fsync(file.fileno())
        facts = {"head_error": None, "identity": manifest.identity_hash}
        write_index(paths.index(shard), index, facts)
    tables = (read_index(paths, manifest, shard)[0] for shard in range(shards))
    columns = write_columns(root, len(lengths), tables)
    counts = Counts(ok=len(lengths), tokens=sum(lengths), loss_tokens=supervised)
    write_manifest(root, manifest.finished(counts, None, columns))
    return root


def _run(field: Field, data: dict[str, bytes], length: int, start: int) -> bytes:
    """The bytes of a field of a row."""
    if field.name in ("loss_mask", "image_mask"):
        ones = length - _prompt(length) if field.name == "loss_mask" else 0
        return b"\0" * (length - ones) + b"\1" * ones
    kind = field.dtype if field.dtype in data else "float"
    if field.name in MASKS or field.name == "position_ids":
        start = 0
    first = start * field.token_bytes
    return data[kind][first : first + length * field.token_bytes]


def _prompt(length: int) -> int:
    """Tokens of a row that are not supervised: its first two thirds."""
    return 2 * length // 3


def _bytes(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def _target(hidden_size: int, vocab_size: int) -> TargetFacts:
    heads = hidden_size // 64
    return TargetFacts(
        id="random",
        revision="",
        architecture="Random",
        model_type="random",
        text_model_type="random",
        num_layers=NUM_LAYERS,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        embedding_rows=vocab_size,
        image_token_id=None,
        video_token_id=None,
        eos_token_ids=[0],
        pad_token_id=0,
        text={
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 64,
            "intermediate_size": 3 * hidden_size,
            "rope_theta": 10000.0,
            "tokenizer_size": vocab_size - 2,
        },
    )
