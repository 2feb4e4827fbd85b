"""A cache of random numbers, written from the schemas alone: no target, no capture."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.schemas.columns import write_columns
from dspark.schemas.digest import FileDigest, field_digest, file_digest
from dspark.schemas.dtypes import FLOAT8_CODE, torch_dtype
from dspark.schemas.extension import Extension, added_fields
from dspark.schemas.fields import Field, build_fields, is_scale, scale_key
from dspark.schemas.float8 import to_float8
from dspark.schemas.holes import written_ranges
from dspark.schemas.index import OK, SKIPPED, IndexRow, read_index, write_index
from dspark.schemas.manifest import Counts, Manifest, TargetFacts, read_manifest, write_manifest
from dspark.schemas.paths import CachePaths, head_path
from dspark.schemas.shard_layout import ShardLayout

VOCAB = 48
HIDDEN = 16
HEADS = 2
LAYERS = 6
IMAGE_ID = VOCAB - 1


def write_cache(
    root: Path,
    *,
    samples: int = 40,
    shards: int = 3,
    max_length: int = 32,
    layers: Sequence[int] = (0, 1, 2, 3, 4),
    logits: str = "head",
    position_rows: int = 1,
    dtype: str = "fp32",
    embeds: str = "all",
    skip_every: int = 7,
    text_every: int = 3,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write a finished cache and return its directory.

    Args:
        root: the directory.
        samples: M.
        shards: N.
        max_length: T.
        layers: stored layers of a target of 6.
        logits: ``head``, ``full`` or ``topk:k``.
        position_rows: 1, or 3 for mRoPE.
        dtype: of the float fields.
        embeds: ``all`` or ``pictures``.
        skip_every: every so many-th row is skipped; 0 for none.
        text_every: every so many-th row has no picture; 0 for none.
        lengths: of the rows; random by default.
        seed: of all numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    fields = build_fields(
        max_length=max_length,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layers=layers,
        dtype=dtype,
        logits=logits,
        position_rows=position_rows,
        embeds=embeds,
    )
    rows_per_shard = -(-samples // shards)
    layout = ShardLayout(fields, rows_per_shard)
    paths = CachePaths(root, shards)
    for path in (paths.shard(0), paths.index(0), head_path(root)):
        path.parent.mkdir(parents=True, exist_ok=True)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    embeddings = torch.randn(VOCAB, HIDDEN, generator=generator)
    save_file({"embed_tokens.weight": embeddings, "lm_head.weight": head.clone()}, head_path(root))
    manifest = Manifest(
        identity={
            **{"target": "synthetic", "seed": seed, "layers": list(layers)},
            **({} if embeds == "all" else {"embeds": embeds}),
        },
        target=TargetFacts(
            id="synthetic",
            revision="",
            architecture="Synthetic",
            model_type="synthetic",
            text_model_type="synthetic",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            embedding_rows=VOCAB,
            image_token_id=IMAGE_ID,
            video_token_id=None,
            eos_token_ids=[0],
            pad_token_id=0,
            text={
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "head_dim": HIDDEN // HEADS,
                "intermediate_size": 2 * HIDDEN,
                "rope_theta": 10000.0,
                "tokenizer_size": VOCAB - 2,
            },
        ),
        data="synthetic",
        num_samples=samples,
        rows_per_shard=rows_per_shard,
        num_shards=shards,
        max_length=max_length,
        dtype=dtype,
        fields=tuple(fields),
        layers=tuple(layers),
        logits=logits,
        versions={},
        shard_bytes=layout.file_size,
        target_files={head_path(root).name: file_digest(head_path(root))},
    )
    counts = {"ok": 0, "tokens": 0, "image_tokens": 0, "loss_tokens": 0}
    skipped = 0
    for shard in range(shards):
        index = []
        with open(paths.shard(shard), "wb") as file:
            file.write(layout.header)
            file.truncate(layout.file_size)
            for row, sample in enumerate(manifest.rows_of(shard)):
                if skip_every and sample % skip_every == skip_every - 1:
                    skipped += 1
                    index.append(IndexRow(sample, row, f"id-{sample}", SKIPPED, "too_long: test"))
                    continue
                length = (
                    int(torch.randint(8, max_length + 1, (1,), generator=generator))
                    if lengths is None
                    else lengths[sample]
                )
                picture = not (text_every and sample % text_every == 0)
                tensors = _row(fields, length, picture, embeddings, head, generator)
                digests = [
                    _write(
                        file.fileno(),
                        layout,
                        field,
                        row,
                        tensors[field.name],
                        tensors["image_mask"],
                    )
                    for field in fields
                ]
                entry = IndexRow(
                    sample,
                    row,
                    f"id-{sample}",
                    OK,
                    length=length,
                    image_tokens=int(tensors["image_mask"].sum()),
                    loss_tokens=int(tensors["loss_mask"].sum()),
                    digests=tuple(digests),
                )
                index.append(entry)
                counts["ok"] += 1
                counts["tokens"] += length
                counts["image_tokens"] += entry.image_tokens
                counts["loss_tokens"] += entry.loss_tokens
        facts = {"head_error": None, "identity": manifest.identity_hash}
        write_index(paths.index(shard), index, facts)
    total = Counts(**counts, skipped={"too_long": skipped} if skipped else {})
    write_manifest(root, manifest.finished(total, None, _write_columns(root, manifest)))
    return root


def with_columns(root: Path) -> Path:
    """Make columns and manifest of a finished cache say what its indexes say; its directory."""
    manifest = read_manifest(root)
    write_manifest(root, replace(manifest, columns=_write_columns(root, manifest)))
    return root


def _write_columns(root: Path, manifest: Manifest) -> FileDigest:
    paths = CachePaths(root, manifest.num_shards)
    tables = (read_index(paths, manifest, shard)[0] for shard in range(manifest.num_shards))
    return write_columns(root, manifest.num_samples, tables)


def add_extension(
    root: Path, *, layers: Sequence[int] = (), logits: str | None = None, seed: int = 1
) -> CachePaths:
    """Add random layers, or the top logits as ``topk:k``, to a cache; where their files lie."""
    generator = torch.Generator().manual_seed(seed)
    manifest = read_manifest(root)
    fields = added_fields(
        max_length=manifest.max_length,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layers=layers,
        dtype=manifest.dtype,
        logits=logits,
    )
    layout = ShardLayout(fields, manifest.rows_per_shard)
    around = {"device": "cpu", "tensor_parallel": 1, "torch": "2", "transformers": "5"}
    number = len(manifest.extensions) + 1
    added = Extension(tuple(layers), logits, tuple(fields), layout.file_size, around, complete=True)
    extended = manifest.with_extension(number, added)
    first, paths = (
        CachePaths(root, manifest.num_shards),
        CachePaths(root, manifest.num_shards, number),
    )
    for shard in range(manifest.num_shards):
        table, _ = read_index(first, manifest, shard)
        index = []
        with open(paths.shard(shard), "wb") as file:
            file.write(layout.header)
            file.truncate(layout.file_size)
            for entry in table.to_pylist():
                digests = []
                for field in fields if entry["status"] == OK else []:
                    shape = (entry["length"], *field.row_shape[1:])
                    numbers = (
                        torch.randint(VOCAB, shape, generator=generator)
                        if field.dtype == "I32"
                        else torch.randn(shape, generator=generator)
                    )
                    if is_scale(field.name):
                        numbers = numbers.abs() + 1
                    tensor = numbers.to(torch_dtype(field.dtype))
                    digests.append(_write(file.fileno(), layout, field, entry["row"], tensor))
                index.append(IndexRow(**{**entry, "digests": tuple(digests)}))
        facts = {"head_error": None, "identity": extended.parts[number].identity_hash}
        write_index(paths.index(shard), index, facts)
    write_manifest(root, extended)
    return paths


def _row(
    fields: Sequence[Field],
    length: int,
    picture: bool,
    embeddings: Tensor,
    head: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The real tokens of one row, in the stored types."""
    ids = torch.randint(1, VOCAB - 2, (length,), generator=generator)
    image = torch.zeros(length, dtype=torch.bool)
    if picture:
        image[1:4] = True
        ids[image] = IMAGE_ID
    loss = torch.rand(length, generator=generator) < 0.8
    loss[: length // 3 + 1] = False
    loss[image] = False
    loss[-2:] = True
    embeds = embeddings[ids]
    embeds[image] = torch.randn(int(image.sum()), HIDDEN, generator=generator)
    by_name = {field.name: field for field in fields}
    dtype = torch_dtype(by_name["last_hidden_state"].dtype)
    last = torch.randn(length, HIDDEN, generator=generator).to(dtype)
    logits = last.float() @ head.T
    positions = torch.arange(length)
    rows = {
        "input_ids": ids,
        "attention_mask": torch.ones(length),
        "loss_mask": loss,
        "image_mask": image,
        "position_ids": positions,
        "inputs_embeds": embeds,
        "last_hidden_state": last,
        "logits": logits,
    }
    if by_name["position_ids"].token_axis == 1:
        rows["position_ids"] = positions + torch.tensor([[0], [100], [200]])
    for name, field in by_name.items():
        if name.startswith("hidden_states."):
            rows[name] = torch.randn(length, HIDDEN, generator=generator)
        if name == "logits_topk.values":
            values, indices = logits.topk(field.row_shape[1])
            rows |= {
                "logits_topk.values": values,
                "logits_topk.indices": indices,
                "logits_topk.logsumexp": logits.logsumexp(-1),
            }
    if by_name["inputs_embeds"].where is not None:
        embeds[~image] = 0
    for name, field in by_name.items():
        if field.dtype == FLOAT8_CODE:
            rows[name], rows[scale_key(name)] = to_float8(rows[name])
    return {
        name: rows[name].to(torch_dtype(field.dtype)).contiguous()
        for name, field in by_name.items()
    }


def _write(
    fd: int,
    layout: ShardLayout,
    field: Field,
    row: int,
    tensor: Tensor,
    image_mask: Tensor | None = None,
) -> int:
    """Write the real tokens of a field of a row; returns their digest."""
    mask = image_mask.numpy() if field.where and image_mask is not None else None
    data = tensor.view(torch.uint8).numpy().tobytes()
    extents = layout.row_extents(field, row, tensor.shape[field.token_axis])
    start = 0
    for offset, size in extents:
        for a, b in written_ranges(field, size, mask):
            os.pwrite(fd, data[start + a : start + b], offset + a)
        start += size
    return field_digest(data)
