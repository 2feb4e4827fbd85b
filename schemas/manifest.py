"""The manifest: what every byte of a cache means.

Written as incomplete before the first shard and replaced, last of all, by the complete one. It
holds no times and no host names, so equal captures have equal manifests.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dspark.schemas.digest import FileDigest, canonical_json, json_digest
from dspark.schemas.dtypes import FLOAT_CODES
from dspark.schemas.durable import write_file
from dspark.schemas.errors import IncompatibleCacheError, OtherVersionError, UnreadableError
from dspark.schemas.fields import Field, build_fields
from dspark.schemas.paths import head_path, index_dir, manifest_path
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.strict_json import read_json

FORMAT = "dspark-cache"
VERSION = 1
_MOST_BYTES = 4 << 20
MOST_SHARDS = 10**6
_LARGEST_COUNT = 2**40
_LARGEST_ID = 2**31  # of tokens, positions and rows of a shard, which are stored as int32
_LARGEST_FILE = 2**63
_QUOTED = 200
_IDENTITY: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("data", "device", "overlong", "target.dtype"), (str,)),
    **dict.fromkeys(("image_root", "target.attention"), (str, type(None))),
    **dict.fromkeys(("batch_tokens", "tensor_parallel"), (int,)),
    **dict.fromkeys(("allow_download", "mask_reasoning", "fake_image"), (bool,)),
}
"""Types of what is read of an identity; what is only compared may be anything, or missing."""
_REDO = "delete it and run the capture again, which keeps the committed shards of the same settings"


@dataclass(frozen=True)
class TargetFacts:
    """What a trainer must know of the target, so that it never opens it.

    Attributes:
        id: folder or Hugging Face id that was captured.
        revision: commit of the Hugging Face repository, or an empty string for a folder.
        architecture: class name of the model.
        model_type: Hugging Face model type.
        text_model_type: model type of the language part.
        num_layers: decoder layers of the language backbone.
        hidden_size: H.
        vocab_size: V, the width of the logits.
        embedding_rows: rows of the input embedding table.
        image_token_id: placeholder of a picture position.
        video_token_id: placeholder of a video position, if the target has one.
        eos_token_ids: ids that end a turn.
        pad_token_id: id used for padding.
        text: dimensions of the language backbone (heads, intermediate size, norm epsilon, rope).
        observed: what the first forward pass showed of how features come about
            (see ``docs/cache-format.md``).
    """

    id: str
    revision: str
    architecture: str
    model_type: str
    text_model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_rows: int
    image_token_id: int | None
    video_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None
    text: dict[str, Any]
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """What the shards hold together."""

    ok: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    image_tokens: int = 0
    loss_tokens: int = 0


@dataclass(frozen=True)
class Manifest:
    """See ``docs/cache-format.md``.

    Attributes:
        identity: all that changes a stored number; a resumed capture must have the same.
        target: facts about the target.
        data: path of the conversations.
        num_samples: M, rows of the dataset.
        rows_per_shard: S; dataset row i is row ``i % S`` of shard ``i // S``.
        num_shards: N.
        max_length: T.
        dtype: ``bf16``, ``fp16`` or ``fp32``: the type of the float fields.
        fields: the stored tensors, in file order.
        layers: captured layers by output; -1 is what layer 0 receives.
        logits: ``full``, ``topk:k`` or ``head``.
        head_error: largest difference between the target's own logits and those recomputed with
            the stored head, or None where the logits are stored.
        versions: of the libraries that captured.
        shard_bytes: size of each shard file, holes included.
        target_files: each file of ``target/``, by its path there with ``/`` between folders.
        counts: totals over all shards.
        complete: whether every shard is committed.
    """

    identity: dict[str, Any]
    target: TargetFacts
    data: str
    num_samples: int
    rows_per_shard: int
    num_shards: int
    max_length: int
    dtype: str
    fields: tuple[Field, ...]
    layers: tuple[int, ...]
    logits: str
    versions: dict[str, str]
    shard_bytes: int
    target_files: dict[str, FileDigest] = field(default_factory=dict)
    head_error: float | None = None
    counts: Counts = field(default_factory=Counts)
    complete: bool = False

    @property
    def identity_hash(self) -> str:
        """Of the identity, 16 hex digits; every index carries it."""
        return json_digest(self.identity)

    def field(self, name: str) -> Field | None:
        """The stored field of that name, or None."""
        return next((f for f in self.fields if f.name == name), None)

    def rows_of(self, shard: int) -> range:
        """Dataset rows of a shard (fewer than S, perhaps none, in the last ones)."""
        start = shard * self.rows_per_shard
        return range(
            min(start, self.num_samples), min(start + self.rows_per_shard, self.num_samples)
        )

    def finished(self, counts: Counts, head_error: float | None) -> "Manifest":
        """The manifest of the complete cache."""
        return replace(self, counts=counts, head_error=head_error, complete=True)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` durably and atomically."""
    document = _to_document(manifest)
    document["digest"] = json_digest(document)
    write_file(manifest_path(root), (json.dumps(document, indent=2) + "\n").encode())


def read_manifest(root: Path) -> Manifest:
    """Read and check ``manifest.json``, which is taken for hostile.

    Raises:
        IncompatibleCacheError: there is none, or it is damaged or of another version.
        UnreadableError: the system does not let it be read.
    """
    path = manifest_path(root)
    try:
        if root.is_file():
            raise IncompatibleCacheError(f"{root} is a file; a cache is the directory around it")
        document = read_json(path, _MOST_BYTES)
    except FileNotFoundError:
        if any(index_dir(root).glob("shard-*-of-*.parquet")):
            raise IncompatibleCacheError(
                f"{path}: missing; the capture command that made this cache writes it again around "
                "the committed shards"
            ) from None
        raise IncompatibleCacheError(
            f"{root} is not a cache: it has no manifest.json; make one with "
            f"'dspark capture --shards N --out {root}'"
        ) from None
    except OSError as error:
        raise UnreadableError(path, error) from None
    except ValueError as error:
        raise IncompatibleCacheError(f"{path}: not readable as JSON ({error}); {_REDO}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise IncompatibleCacheError(f'{path}: not a cache manifest ("format" is not {FORMAT!r})')
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise OtherVersionError(
            f"{path}: cache version {reprlib.repr(version)}, this dspark reads {VERSION}; "
            "install the dspark that wrote it, or capture again"
        )
    try:
        if document.pop("digest", None) != json_digest(document):
            raise ValueError("it does not have the digest that it names")
        manifest = _from_document(document)
        _check(manifest)
        _check_same(_to_document(manifest), document)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise IncompatibleCacheError(
            f"{path}: damaged ({type(error).__name__}: {str(error)[:_QUOTED]}); {_REDO}"
        ) from None


def _to_document(manifest: Manifest) -> dict[str, Any]:
    """All of ``manifest.json`` but its digest."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "complete": manifest.complete,
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "rows_per_shard": manifest.rows_per_shard,
        "max_length": manifest.max_length,
        "dtype": manifest.dtype,
        "layers": {
            "output_of_layer": list(manifest.layers),
            "huggingface_index": [k + 1 for k in manifest.layers],
        },
        "conventions": {
            "alignment": "input_ids",
            "last_hidden_state": "post_norm",
            "loss_mask": "unshifted",
        },
        "logits": {"mode": manifest.logits, "head_error": manifest.head_error},
        "fields": [
            {
                "name": f.name,
                "dtype": f.dtype,
                "shape": [manifest.rows_per_shard, *f.row_shape],
                "token_axis": f.token_axis + 1,
            }
            for f in manifest.fields
        ],
        "shard_bytes": manifest.shard_bytes,
        "counts": asdict(manifest.counts),
        "target": asdict(manifest.target),
        "target_files": {name: asdict(file) for name, file in manifest.target_files.items()},
        "data": manifest.data,
        "identity": manifest.identity,
        "versions": manifest.versions,
    }


def _from_document(document: Mapping[str, Any]) -> Manifest:
    """The manifest of a document; that all types are right is for ``_check`` to find."""
    return Manifest(
        identity=document["identity"],
        target=TargetFacts(**document["target"]),
        data=document["data"],
        num_samples=document["num_samples"],
        rows_per_shard=document["rows_per_shard"],
        num_shards=document["num_shards"],
        max_length=document["max_length"],
        dtype=document["dtype"],
        fields=tuple(
            Field(f["name"], f["dtype"], tuple(f["shape"][1:]), f["token_axis"] - 1)
            for f in document["fields"]
        ),
        layers=tuple(document["layers"]["output_of_layer"]),
        logits=document["logits"]["mode"],
        head_error=document["logits"]["head_error"],
        versions=document["versions"],
        shard_bytes=document["shard_bytes"],
        target_files={n: FileDigest(**f) for n, f in document["target_files"].items()},
        counts=Counts(**document["counts"]),
        complete=document["complete"],
    )


def _check(manifest: Manifest) -> None:
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
    _check_fields(m)
    _check_counts(m)
    for name, file in m.target_files.items():
        if not is_inside(name):
            raise ValueError(
                f"target_files names {reprlib.repr(name)}, which is not inside target/"
            )
        if not 0 <= file.bytes < _LARGEST_FILE or not re.fullmatch("[0-9a-f]{16}", file.digest):
            raise ValueError(f"target_files: {reprlib.repr(name)} cannot be so")
    if head_path(Path()).name not in m.target_files:
        raise ValueError("target_files lacks the head's weights")


def _check_types(m: Manifest) -> None:
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
        ("target_files' bytes", [f.bytes for f in m.target_files.values()], int),
        ("target_files' digests", [f.digest for f in m.target_files.values()], str),
    ):
        for value in values:
            if type(value) is not kind:
                raise TypeError(f"{names}: {reprlib.repr(value)} is no {kind.__name__}")


def _check_identity(m: Manifest) -> None:
    """Check what a command or a capture that goes on reads of the identity, and paths."""
    for key in _IDENTITY.keys() & m.identity:
        value = m.identity[key]
        if type(value) not in _IDENTITY[key] or (
            type(value) is int and not 1 <= value < _LARGEST_COUNT
        ):
            raise ValueError(f"identity: {key} is {reprlib.repr(value)}")
    for path in (m.data, m.target.id, m.target.revision, m.identity.get("image_root") or ""):
        if b"\0" in path.encode("utf-8", "surrogateescape"):
            raise ValueError(f"{reprlib.repr(path)} is no name")


def _check_fields(m: Manifest) -> None:
    """Check that the fields are those that the manifest's own numbers ask for, and fit a file."""
    if m.dtype not in FLOAT_CODES:
        raise ValueError(f"dtype is {reprlib.repr(m.dtype)}")
    k = re.fullmatch(r"full|head|topk:([1-9]\d{0,9})", m.logits)
    if k is None or int(k[1] or 1) > m.target.vocab_size:
        raise ValueError(f"logits.mode is {reprlib.repr(m.logits)}")
    if list(m.layers) != sorted({*m.layers}) or any(
        not -1 <= layer <= m.target.num_layers - 2 for layer in m.layers
    ):
        raise ValueError(f"layers are {reprlib.repr(list(m.layers))}")
    positions = m.field("position_ids")
    fields = build_fields(
        max_length=m.max_length,
        hidden_size=m.target.hidden_size,
        vocab_size=m.target.vocab_size,
        layers=m.layers,
        dtype=m.dtype,
        logits=m.logits,
        position_rows=positions.row_shape[0] if positions and positions.token_axis else 1,
    )
    if len(m.fields) != len(fields):
        raise ValueError(f"fields: {len(m.fields)} of them, {len(fields)} expected")
    for stored, expected in zip(m.fields, fields, strict=True):
        if stored != expected:
            raise ValueError(f"field {reprlib.repr(stored.name)} is not as the rest asks for")
    size = ShardLayout(m.fields, m.rows_per_shard).file_size
    if not m.shard_bytes == size < _LARGEST_FILE:
        raise ValueError(f"shard_bytes is {m.shard_bytes}")


def _check_counts(m: Manifest) -> None:
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


def _check_same(expected: dict[str, Any], document: dict[str, Any]) -> None:
    """Check that a document says what its manifest says and nothing beside it.

    Raises:
        ValueError: an entry is unknown or is not as this version writes it.
    """
    for key in sorted({*expected, *document}):
        if canonical_json(expected.get(key)) != canonical_json(document.get(key)):
            raise ValueError(f"{reprlib.repr(key)} is not as version {VERSION} has it")


def identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One phrase for each identity entry that differs: ``name: old -> new``."""
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
