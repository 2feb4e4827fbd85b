"""Whether the values of a manifest can be, and fit each other."""

import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dspark.schemas.columns import columns_layout
from dspark.schemas.digest import FileDigest
from dspark.schemas.dtypes import FLOAT_CODES
from dspark.schemas.extension import added_fields
from dspark.schemas.fields import FIELDS, KEPT, Field, build_fields
from dspark.schemas.paths import head_path
from dspark.schemas.shard_layout import ShardLayout

if TYPE_CHECKING:
    from dspark.schemas.manifest import Manifest

MOST_SHARDS = 10**6
_MOST_ADDED_ENTRIES = 10**4
_LARGEST_COUNT = 2**40
_LARGEST_ID = 2**31  # of tokens, positions and rows of a shard, which are stored as int32
_LARGEST_FILE = 2**63
_IDENTITY: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("data", "device", "embeds", "overlong", "target.dtype"), (str,)),
    **dict.fromkeys(("image_root", "target.attention"), (str, type(None))),
    **dict.fromkeys(("batch_tokens", "tensor_parallel"), (int,)),
    **dict.fromkeys(("allow_download", "mask_reasoning", "fake_image"), (bool,)),
}
"""Types of what is read of an identity; what is only compared may be anything, or missing."""


def check_manifest(manifest: "Manifest") -> None:
    """Check that the values of a manifest have their types and fit each other.

    Raises:
        ValueError: they do not.
        TypeError: one is of another type.
    """
    m = manifest
    _check_types(m)
    _check_identity(m)
    for name, size, limit in (
        ("num_samples", m.num_samples, _LARGEST_COUNT),
        ("num_shards", m.num_shards, MOST_SHARDS + 1),
        ("rows_per_shard", m.rows_per_shard, _LARGEST_ID),
        ("max_length", m.max_length, _LARGEST_ID),
        ("target.num_layers", m.target.num_layers, _LARGEST_ID),
        ("target.hidden_size", m.target.hidden_size, _LARGEST_ID),
        ("target.vocab_size", m.target.vocab_size, _LARGEST_ID),
        ("target.embedding_rows", m.target.embedding_rows, _LARGEST_ID),
    ):
        if not 1 <= size < limit:
            raise ValueError(f"{name} is {size}")
    if m.rows_per_shard != -(-m.num_samples // m.num_shards):
        raise ValueError(f"rows_per_shard is {m.rows_per_shard}")
    if m.head_error is not None and m.head_error < 0:
        raise ValueError(f"logits.head_error is {m.head_error}")
    m.shard_format.check()
    _check_choices(m)
    _check_fields(m, _first_fields(m))
    _check_extensions(m)
    _check_counts(m)
    _check_columns(m)
    for name, file in m.target_files.items():
        if not is_inside(name):
            raise ValueError(
                f"target_files names {reprlib.repr(name)}, which is not inside target/"
            )
        if not _can_be(file):
            raise ValueError(f"target_files: {reprlib.repr(name)} cannot be so")
    if head_path(Path()).name not in m.target_files:
        raise ValueError("target_files lacks the head's weights")


def _can_be(file: FileDigest) -> bool:
    return 0 <= file.bytes < _LARGEST_FILE and bool(re.fullmatch("[0-9a-f]{16}", file.digest))


def _check_columns(m: "Manifest") -> None:
    if m.columns is None:
        if m.complete:
            raise ValueError("it is complete and lacks columns")
    elif not _can_be(m.columns) or m.columns.bytes != columns_layout(m.num_samples).file_size:
        raise ValueError("columns cannot be so")


def _check_types(m: "Manifest") -> None:
    files = [*m.target_files.values(), *([] if m.columns is None else [m.columns])]
    sizes = (m.num_samples, m.num_shards, m.rows_per_shard, m.max_length, m.shard_bytes)
    t, c = m.target, m.counts
    texts = (t.id, t.revision, t.architecture, t.model_type, t.text_model_type)
    for names, values, kind in (
        ("sizes", sizes, int),
        ("layers", m.layers, int),
        ("complete", (m.complete,), bool),
        ("data, dtype or logits.mode", (m.data, m.dtype, m.logits), str),
        ("logits.head_error", () if m.head_error is None else (m.head_error,), float),
        ("identity, versions or target_files", (m.identity, m.versions, m.target_files), dict),
        ("versions", m.versions.values(), str),
        ("field names and types", [v for f in m.fields for v in (f.name, f.dtype)], str),
        ("field shapes", [n for f in m.fields for n in (*f.row_shape, f.token_axis)], int),
        ("counts", (c.ok, c.tokens, c.image_tokens, c.loss_tokens), int),
        ("counts.skipped", (c.skipped,), dict),
        ("counts.skipped", c.skipped.values(), int),
        ("target's names", texts, str),
        ("target's sizes", (t.num_layers, t.hidden_size, t.vocab_size, t.embedding_rows), int),
        ("target.text or target.observed", (t.text, t.observed), dict),
        ("target.text.tokenizer_size", (t.text.get("tokenizer_size", 0),), int),
        ("target.eos_token_ids", (t.eos_token_ids,), list),
        ("target.eos_token_ids", t.eos_token_ids, int),
        *(
            ("target's token ids", () if i is None else (i,), int)
            for i in (t.image_token_id, t.video_token_id, t.pad_token_id)
        ),
        ("target_files' or columns' bytes", [f.bytes for f in files], int),
        ("target_files' or columns' digests", [f.digest for f in files], str),
    ):
        for value in values:
            if type(value) is not kind:
                raise TypeError(f"{names}: {reprlib.repr(value)} is no {kind.__name__}")


def _check_identity(m: "Manifest") -> None:
    """Check what a command or a capture that goes on reads of the identity, and paths."""
    for key in _IDENTITY.keys() & m.identity:
        value = m.identity[key]
        if type(value) not in _IDENTITY[key] or (
            type(value) is int and not 1 <= value < _LARGEST_COUNT
        ):
            raise ValueError(f"identity: {key} is {reprlib.repr(value)}")
    if type(m.identity.get(FIELDS, [])) is not list:
        raise TypeError(f"identity: {FIELDS} are {reprlib.repr(m.identity[FIELDS])}")
    for path in (m.data, m.target.id, m.target.revision, m.identity.get("image_root") or ""):
        if b"\0" in path.encode("utf-8", "surrogateescape"):
            raise ValueError(f"{reprlib.repr(path)} is no name")


def _check_extensions(m: "Manifest") -> None:
    """Check each extension as strictly as the first files, and that no field is stored twice."""
    if len(m.extensions) * len(m.identity) > _MOST_ADDED_ENTRIES:  # each part has an identity
        raise ValueError(f"extensions: {len(m.extensions)} are too many")
    for extension in m.extensions:
        extension.check_types()
    for part in m.parts[1:]:
        _check_types(part)
        _check_identity(part)
        _check_choices(part)
        added = added_fields(
            max_length=m.max_length,
            hidden_size=m.target.hidden_size,
            vocab_size=m.target.vocab_size,
            layers=part.layers,
            dtype=m.dtype,
            logits=part.logits,
        )
        _check_fields(part, added)
    names = Counter(f.name for part in m.parts for f in part.fields)
    if m.identity.get(FIELDS, [*names]) != [*names]:
        raise ValueError(f"identity: {FIELDS} are not those of the shards")
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"field {reprlib.repr(twice[0])} is stored twice")


def _first_fields(m: "Manifest") -> list[Field]:
    """The fields that the manifest's own numbers ask for in each shard's first file."""
    positions = next((f for f in m.fields if f.name == "position_ids"), None)
    fields = build_fields(
        max_length=m.max_length,
        hidden_size=m.target.hidden_size,
        vocab_size=m.target.vocab_size,
        layers=m.layers,
        dtype=m.dtype,
        logits=m.logits,
        position_rows=positions.row_shape[0] if positions and positions.token_axis else 1,
        embeds=str(m.identity.get("embeds", "all")),
    )
    if FIELDS not in m.identity:
        return fields
    hidden = [f.name for f in fields if f.name.startswith("hidden_states.")]
    return [f for f in fields if f.name in (*KEPT, *hidden, *m.identity[FIELDS])]


def _check_choices(m: "Manifest") -> None:
    """Check what the fields of a part follow from."""
    if m.dtype not in FLOAT_CODES:
        raise ValueError(f"dtype is {reprlib.repr(m.dtype)}")
    k = re.fullmatch(r"full|head|topk:([1-9]\d{0,9})", m.logits)
    if k is None or int(k[1] or 1) > m.target.vocab_size:
        raise ValueError(f"logits.mode is {reprlib.repr(m.logits)}")
    if list(m.layers) != sorted({*m.layers}) or any(
        not -1 <= layer <= m.target.num_layers - 2 for layer in m.layers
    ):
        raise ValueError(f"layers are {reprlib.repr(list(m.layers))}")


def _check_fields(m: "Manifest", fields: Sequence[Field]) -> None:
    """Check that the fields of a part are ``fields``, and fit a file."""
    if len(m.fields) != len(fields):
        raise ValueError(f"fields: {len(m.fields)} of them, {len(fields)} expected")
    for stored, expected in zip(m.fields, fields, strict=True):
        if stored != expected:
            raise ValueError(f"field {reprlib.repr(stored.name)} is not as the rest asks for")
    size = ShardLayout(m.fields, m.rows_per_shard).file_size
    if not m.shard_bytes == size < _LARGEST_FILE:
        raise ValueError(f"shard_bytes is {m.shard_bytes}")


def _check_counts(m: "Manifest") -> None:
    c = m.counts
    if (
        min(c.ok, c.tokens, c.image_tokens, c.loss_tokens, *c.skipped.values()) < 0
        or max(c.image_tokens, c.loss_tokens) > c.tokens
        or not c.ok <= c.tokens <= c.ok * m.max_length
        or (m.complete and c.ok + sum(c.skipped.values()) != m.num_samples)
    ):
        raise ValueError("counts do not fit each other")


def is_inside(name: str) -> bool:
    """Whether ``name`` is a plain relative path, ``/`` between folders, that stays in its root."""
    path = PurePosixPath(name)
    return (
        str(path) == name != "."
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in name
    )
