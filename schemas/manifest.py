"""The manifest: what every byte of a cache means.

Written as incomplete before the first shard and replaced, last of all, by the complete one. It
holds no times and no host names, so equal captures have equal manifests.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.schemas.digest import FileDigest, canonical_json, json_digest
from dspark.schemas.durable import write_file
from dspark.schemas.errors import IncompatibleCacheError, OtherVersionError, UnreadableError
from dspark.schemas.extension import Extension, layers_document
from dspark.schemas.fields import Field
from dspark.schemas.manifest_check import check_manifest
from dspark.schemas.paths import index_dir, manifest_path
from dspark.schemas.shard_format import ShardFormat
from dspark.schemas.strict_json import read_json

FORMAT = "dspark-cache"
VERSION = 1
_MOST_BYTES = 4 << 20
_QUOTED = 200
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
        dtype: ``bf16``, ``fp16``, ``fp32`` or ``fp8``: the type of the float fields.
        fields: the tensors of each shard's first file, in file order; ``all_fields`` has all.
        layers: captured layers by output, in that file; -1 is what layer 0 receives.
        logits: ``full``, ``topk:k`` or ``head``.
        head_error: largest difference between the target's own logits and those recomputed with
            the stored head, or None where the logits are stored.
        versions: of the libraries that captured.
        shard_bytes: size of each shard in its safetensors form, holes included.
        target_files: each file of ``target/``, by its path there with ``/`` between folders.
        counts: totals over all shards.
        columns: what ``index/columns.safetensors`` of the complete cache must be.
        complete: whether every shard is committed.
        extensions: fields that were added later, in further files beside each shard.
        shard_format: the form of all shards, those of extensions among them.
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
    columns: FileDigest | None = None
    complete: bool = False
    extensions: tuple[Extension, ...] = ()
    shard_format: ShardFormat = ShardFormat()

    @property
    def identity_hash(self) -> str:
        """Of the identity, 16 hex digits; every index carries it."""
        return json_digest(self.identity)

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """The stored fields, those of finished extensions among them."""
        return self.fields + tuple(f for e in self.extensions if e.complete for f in e.fields)

    @property
    def all_layers(self) -> tuple[int, ...]:
        """The stored layers, those of finished extensions among them, in their order."""
        added = (k for e in self.extensions if e.complete for k in e.layers)
        return tuple(sorted({*self.layers, *added}))

    @property
    def best_logits(self) -> str:
        """The fullest form in which logits are stored: ``full``, ``topk:k`` or ``head``."""
        forms = {self.logits, *(e.logits for e in self.extensions if e.complete and e.logits)}
        return min(forms, key=lambda form: ("full", "topk", "head").index(form.partition(":")[0]))

    @property
    def parts(self) -> tuple["Manifest", ...]:
        """The cache as each kind of file has it: the first files, then those of each extension.

        A part is a manifest without extensions, whose fields, layers, logits, identity, size and
        completeness are those of its files; ``CachePaths(…, part)`` names these.
        """
        return (replace(self, extensions=()), *map(self._part, self.extensions))

    def _part(self, extension: Extension) -> "Manifest":
        logits = extension.logits or "head"
        own = {"layers": list(extension.layers), "logits": logits, **extension.around}
        return replace(
            self,
            identity={**self.identity, **own},
            layers=extension.layers,
            logits=logits,
            fields=extension.fields,
            shard_bytes=extension.shard_bytes,
            head_error=None,
            complete=extension.complete,
            extensions=(),
        )

    def with_extension(self, number: int, extension: Extension) -> "Manifest":
        """The manifest with the extension of that number (from 1), which may be the next one."""
        before, after = self.extensions[: number - 1], self.extensions[number:]
        return replace(self, extensions=(*before, extension, *after))

    def field(self, name: str) -> Field | None:
        """The stored field of that name, or None."""
        return next((f for f in self.all_fields if f.name == name), None)

    def rows_of(self, shard: int) -> range:
        """Dataset rows of a shard (fewer than S, perhaps none, in the last ones)."""
        start = shard * self.rows_per_shard
        return range(
            min(start, self.num_samples), min(start + self.rows_per_shard, self.num_samples)
        )

    def finished(self, counts: Counts, head_error: float | None, columns: FileDigest) -> "Manifest":
        """The manifest of the complete cache."""
        return replace(self, counts=counts, head_error=head_error, columns=columns, complete=True)

    def unfinished(self) -> "Manifest":
        """The manifest from before the last shard."""
        return replace(self, counts=Counts(), head_error=None, columns=None, complete=False)


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
        check_manifest(manifest)
        _check_same(_to_document(manifest), document)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise IncompatibleCacheError(
            f"{path}: damaged ({type(error).__name__}: {str(error)[:_QUOTED]}); {_REDO}"
        ) from None


def _to_document(manifest: Manifest) -> dict[str, Any]:
    """All of ``manifest.json`` but its digest."""
    extensions = [e.document(manifest.rows_per_shard) for e in manifest.extensions]
    return {
        "format": FORMAT,
        "version": VERSION,
        "complete": manifest.complete,
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "rows_per_shard": manifest.rows_per_shard,
        "max_length": manifest.max_length,
        "dtype": manifest.dtype,
        "layers": layers_document(manifest.layers),
        "conventions": {
            "alignment": "input_ids",
            "last_hidden_state": "post_norm",
            "loss_mask": "unshifted",
        },
        "logits": {"mode": manifest.logits, "head_error": manifest.head_error},
        "fields": [f.document(manifest.rows_per_shard) for f in manifest.fields],
        "shard_bytes": manifest.shard_bytes,
        "shard_format": manifest.shard_format.document(),
        "counts": asdict(manifest.counts),
        "columns": None if manifest.columns is None else asdict(manifest.columns),
        "target": asdict(manifest.target),
        "target_files": {name: asdict(file) for name, file in manifest.target_files.items()},
        "data": manifest.data,
        "identity": manifest.identity,
        "versions": manifest.versions,
        **({"extensions": extensions} if extensions else {}),
    }


def _from_document(document: Mapping[str, Any]) -> Manifest:
    """The manifest of a document; that all types are right is for ``check_manifest`` to find."""
    return Manifest(
        identity=document["identity"],
        target=TargetFacts(**document["target"]),
        data=document["data"],
        num_samples=document["num_samples"],
        rows_per_shard=document["rows_per_shard"],
        num_shards=document["num_shards"],
        max_length=document["max_length"],
        dtype=document["dtype"],
        fields=tuple(map(Field.from_document, document["fields"])),
        layers=tuple(document["layers"]["output_of_layer"]),
        logits=document["logits"]["mode"],
        head_error=document["logits"]["head_error"],
        versions=document["versions"],
        shard_bytes=document["shard_bytes"],
        target_files={n: FileDigest(**f) for n, f in document["target_files"].items()},
        counts=Counts(**document["counts"]),
        columns=FileDigest(**found) if (found := document["columns"]) is not None else None,
        complete=document["complete"],
        extensions=tuple(map(Extension.read, document.get("extensions", []))),
        shard_format=ShardFormat.read(document["shard_format"]),
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

    def said(value: Any) -> str:
        return "not given" if value is None else repr(value)

    return [
        f"{key}: {said(old.get(key))} there, {said(new.get(key))} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
