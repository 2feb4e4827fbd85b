"""What a conversion will write: the manifest of the new cache."""

from collections.abc import Collection
from dataclasses import replace

from dspark.schemas.errors import InputError
from dspark.schemas.extension import Extension
from dspark.schemas.fields import FIELDS, KEPT, SCALE, Field
from dspark.schemas.layers import layer_of
from dspark.schemas.manifest import Manifest
from dspark.schemas.shard_format import ShardFormat
from dspark.schemas.shard_layout import ShardLayout


def planned(manifest: Manifest, form: ShardFormat, fields: str | None) -> Manifest:
    """The manifest of the finished new cache.

    Extensions that are not finished are left out. With all fields, the identity stays; with some,
    it lists them, so that no capture continues or extends the new cache.

    Args:
        manifest: of the cache that is read, which is complete.
        form: of the new cache.
        fields: to keep, as ``--fields`` has them; None for all.

    Raises:
        InputError: a field is not there.
    """
    finished = tuple(e for e in manifest.extensions if e.complete)
    whole = replace(manifest, extensions=finished, shard_format=form)
    if fields is None:
        return whole
    kept = _kept(whole, fields)
    if len(kept) == len(whole.all_fields):
        return whole
    first = _some(whole.fields, kept)
    return replace(
        whole,
        identity={**whole.identity, FIELDS: kept},
        fields=first,
        layers=_layers(first),
        shard_bytes=ShardLayout(first, whole.rows_per_shard).file_size,
        extensions=tuple(
            _smaller(extension, kept, whole.rows_per_shard)
            for extension in whole.extensions
            if _some(extension.fields, kept)
        ),
    )


def begun(manifest: Manifest) -> Manifest:
    """The manifest of the same cache before its first shard."""
    return replace(
        manifest.unfinished(),
        extensions=tuple(replace(e, complete=False) for e in manifest.extensions),
    )


def _kept(manifest: Manifest, fields: str) -> list[str]:
    """The names to keep, in the order of the manifest: with a field, what it means nothing
    without. Where no logits are named, all stay: no draft trains without those of its cache."""
    asked = {name.strip() for name in fields.split(",")}
    there = [field.name for field in manifest.all_fields]
    for name in sorted(asked):
        if name not in there:
            raise InputError(
                f"--fields {name}: the cache has no such field; it has {', '.join(there)}"
            )
    logits = {name for name in there if name.startswith("logits")}
    if asked & logits:
        logits = set()
    groups = {_group(name) for name in (*asked, *logits, *KEPT)}
    return [name for name in there if _group(name) in groups]


def _group(name: str) -> str:
    """The three fields of the largest logits mean nothing without each other, nor do 8 bits and
    their scales."""
    return "logits_topk" if name.startswith("logits_topk.") else name.removesuffix(SCALE)


def _some(fields: Collection[Field], kept: Collection[str]) -> tuple[Field, ...]:
    return tuple(field for field in fields if field.name in kept)


def _layers(fields: Collection[Field]) -> tuple[int, ...]:
    return tuple(k for field in fields if (k := layer_of(field.name)) is not None)


def _smaller(extension: Extension, kept: Collection[str], rows_per_shard: int) -> Extension:
    fields = _some(extension.fields, kept)
    layers = _layers(fields)
    return replace(
        extension,
        layers=layers,
        logits=extension.logits if any(f.name.startswith("logits") for f in fields) else None,
        fields=fields,
        shard_bytes=ShardLayout(fields, rows_per_shard).file_size,
    )
