"""The manifest: what every byte of a cache means.

Written as incomplete before the first shard and replaced, last of all, by the complete one. It
holds no times and no host names, so equal captures have equal manifests.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from dspark.schemas.dtypes import FLOAT_CODES, ITEMSIZE
from dspark.schemas.durable import write_file
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.fields import Field
from dspark.schemas.paths import manifest_path
from dspark.schemas.shard_layout import ShardLayout

FORMAT = "dspark-cache"
VERSION = 1
_LARGEST = 2**40
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
    head_error: float | None = None
    counts: Counts = field(default_factory=Counts)
    complete: bool = False

    @property
    def identity_hash(self) -> str:
        """Of the identity, 16 hex digits; every index carries it."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.identity, sort_keys=True).encode())

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
    document = {
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
        "data": manifest.data,
        "identity": manifest.identity,
        "versions": manifest.versions,
    }
    write_file(manifest_path(root), (json.dumps(document, indent=2) + "\n").encode())


def read_manifest(root: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        IncompatibleCacheError: there is none, or it is damaged or of another version.
    """
    path = manifest_path(root)
    if root.is_file():
        raise IncompatibleCacheError(f"{root} is a file; a cache is the directory around it")
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise IncompatibleCacheError(
            f"{root} is not a cache: it has no manifest.json; make one with "
            f"'dspark capture --shards N --out {root}'"
        ) from None
    except (OSError, ValueError) as error:
        raise IncompatibleCacheError(f"{path}: not readable as JSON ({error}); {_REDO}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise IncompatibleCacheError(f'{path}: not a cache manifest ("format" is not {FORMAT!r})')
    if document.get("version") != VERSION:
        raise IncompatibleCacheError(
            f"{path}: cache version {document.get('version')!r}, this dspark reads {VERSION}; "
            "install the dspark that wrote it, or capture again"
        )
    try:
        manifest = _from_document(document)
        _check(manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise IncompatibleCacheError(
            f"{path}: damaged ({type(error).__name__}: {error}); {_REDO}"
        ) from None


def _from_document(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        identity=dict(document["identity"]),
        target=TargetFacts(**document["target"]),
        data=str(document["data"]),
        num_samples=int(document["num_samples"]),
        rows_per_shard=int(document["rows_per_shard"]),
        num_shards=int(document["num_shards"]),
        max_length=int(document["max_length"]),
        dtype=str(document["dtype"]),
        fields=tuple(
            Field(f["name"], f["dtype"], tuple(map(int, f["shape"][1:])), int(f["token_axis"]) - 1)
            for f in document["fields"]
        ),
        layers=tuple(map(int, document["layers"]["output_of_layer"])),
        logits=str(document["logits"]["mode"]),
        head_error=document["logits"]["head_error"],
        versions=dict(document["versions"]),
        shard_bytes=int(document["shard_bytes"]),
        counts=Counts(**document["counts"]),
        complete=bool(document["complete"]),
    )


def _check(manifest: Manifest) -> None:
    """Check that the numbers of a manifest fit each other.

    Raises:
        ValueError: they do not.
        TypeError: one is of another type.
    """
    m = manifest
    sizes = {
        "num_samples": m.num_samples,
        "num_shards": m.num_shards,
        "max_length": m.max_length,
        "target.num_layers": m.target.num_layers,
        "target.hidden_size": m.target.hidden_size,
        "target.vocab_size": m.target.vocab_size,
        "target.embedding_rows": m.target.embedding_rows,
    }
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < _LARGEST:
            raise ValueError(f"{name} is {size!r}")
    if m.rows_per_shard != -(-m.num_samples // m.num_shards):
        raise ValueError(f"rows_per_shard is {m.rows_per_shard}")
    if m.dtype not in FLOAT_CODES:
        raise ValueError(f"dtype is {m.dtype!r}")
    if not re.fullmatch(r"full|head|topk:[1-9]\d*", m.logits):
        raise ValueError(f"logits.mode is {m.logits!r}")
    if not isinstance(m.target.text, dict) or not isinstance(m.target.eos_token_ids, list):
        raise TypeError("target.text or target.eos_token_ids")
    counted = (m.counts.ok, m.counts.tokens, m.counts.image_tokens, m.counts.loss_tokens)
    if any(type(n) is not int or n < 0 for n in (*counted, *m.counts.skipped.values())):
        raise ValueError("counts")
    if len({f.name for f in m.fields}) != len(m.fields) or not m.fields:
        raise ValueError("fields")
    for stored in m.fields:
        dims = stored.row_shape
        if stored.dtype not in ITEMSIZE or not dims or not all(1 <= d < _LARGEST for d in dims):
            raise ValueError(f"field {stored.name!r}")
        if not 0 <= stored.token_axis < len(dims) or dims[stored.token_axis] != m.max_length:
            raise ValueError(f"field {stored.name!r}")
    if m.shard_bytes != ShardLayout(m.fields, m.rows_per_shard).file_size:
        raise ValueError(f"shard_bytes is {m.shard_bytes}")


def identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One phrase for each identity entry that differs: ``name: old -> new``."""
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
