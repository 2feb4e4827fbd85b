"""What is in a cache, for ``dspark inspect``."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.remote.mirror import Mirror
from dspark.schemas.errors import IncompatibleCacheError, InputError, UnreadableError
from dspark.schemas.index import OK
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.options import check_given
from dspark.schemas.parts import parts
from dspark.schemas.paths import target_dir
from dspark.schemas.stored_shard import shard_files, shard_place
from dspark.schemas.url import is_url, refuse_local_cache
from dspark.train_from_cache.cache import open_cache

_BLOCK = 512  # the unit of st_blocks, whatever the file system's own
_PAGE = 4096


def inspect_cache(path: str, local_cache: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Fields, bytes and counts of a cache, finished or not, as JSON-ready values.

    Of a cache at a URL only the manifest and the columns are fetched, so ``physical_bytes`` and
    ``cache_bytes`` are those of what is here, in the local cache.

    Raises:
        IncompatibleCacheError: ``path`` is no cache, or its manifest is damaged.
        UnreadableError: the system does not let it be looked at.
    """
    check_given(cache=path, local_cache=local_cache)
    if is_url(path):
        mirror = Mirror(path, local_cache, target_files=False)
        return _summary(mirror.root, mirror.manifest, mirror.url)
    refuse_local_cache(path, local_cache)
    root = Path(path)
    manifest = read_manifest(root)
    try:
        return _summary(root, manifest)
    except OSError as error:
        raise UnreadableError(Path(error.filename or root), error) from None


def _summary(root: Path, manifest: Manifest, url: str | None = None) -> dict[str, Any]:
    tokens = manifest.counts.tokens
    stats: list[os.stat_result] = []
    fields: list[dict[str, Any]] = []
    committed = []
    for paths, part in parts(root, manifest):
        found = [
            i for i in range(manifest.num_shards) if url or shard_place(paths, part, i).exists()
        ]
        if url is None:
            stats += [p.stat() for i in found for p in shard_files(paths, part, i) if p.exists()]
        committed.append(
            len(found) if url else sum(paths.index(i).exists() for i in range(manifest.num_shards))
        )
        fields += [
            {
                "name": f.name,
                "dtype": f.dtype,
                "shape": [manifest.rows_per_shard, *f.row_shape],
                "token_bytes": f.token_bytes,
                "real_bytes": f.real_bytes(tokens, manifest.counts.image_tokens),
                "logical_bytes": f.row_bytes * manifest.rows_per_shard * len(found),
                "part": paths.part,
                "where": f.where,
            }
            for f in part.fields
            if part.complete or not paths.part
        ]
    real_bytes = sum(f["real_bytes"] for f in fields)
    cache_bytes = sum(p.stat().st_blocks * _BLOCK for p in root.rglob("*") if p.is_file())
    physical_bytes = sum(s.st_blocks * _BLOCK for s in stats) if url is None else cache_bytes
    return {
        "path": url or str(root),
        "mirror": None if url is None else str(root),
        "complete": manifest.complete,
        "committed_shards": committed[0],
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "rows_per_shard": manifest.rows_per_shard,
        "max_length": manifest.max_length,
        "dtype": manifest.dtype,
        "layers": list(manifest.all_layers),
        "logits": manifest.best_logits,
        "head_error": manifest.head_error,
        "counts": asdict(manifest.counts),
        "target": asdict(manifest.target),
        "fields": fields,
        "extensions": [
            {
                "part": number,
                "complete": extension.complete,
                "committed_shards": committed[number],
                "layers": list(extension.layers),
                "logits": extension.logits,
            }
            for number, extension in enumerate(manifest.extensions, 1)
        ],
        "real_bytes": real_bytes,
        "physical_bytes": physical_bytes,
        "filled_bytes": 0 if url else _filled_bytes(manifest, real_bytes, physical_bytes),
        "shard_format": manifest.shard_format.document(),
        "logical_bytes": sum(s.st_size for s in stats)
        if url is None
        else sum(f["logical_bytes"] for f in fields),
        "cache_bytes": cache_bytes,
    }


def _filled_bytes(manifest: Manifest, real_bytes: int, physical_bytes: int) -> int:
    """Bytes of padding on disk; 0 if they are hardly more than the rests of disk blocks."""
    if not manifest.complete:
        return 0  # its counts are not known yet
    runs = manifest.counts.ok * sum(len(f.extents(1)) for f in manifest.all_fields)
    filled = physical_bytes - real_bytes
    return filled if filled - 2 * _PAGE * runs > 0.1 * real_bytes else 0


def inspect_sample(
    path: str, sample: int, local_cache: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The tokens of one dataset row, each marked as image, loss or fake.

    Raises:
        InputError: there is no such row.
        IncompatibleCacheError: the cache is unfinished or damaged.
    """
    cache = open_cache(path, local_cache=local_cache)
    if not 0 <= sample < len(cache):
        raise InputError(f"--sample {sample}: the cache has rows 0 to {len(cache) - 1}")
    entry = cache.entry(sample)
    tokens = []
    if entry["status"] == OK:
        stored = cache[sample]
        texts = _texts(cache.root, stored["input_ids"].tolist())
        for t, (token, text) in enumerate(zip(stored["input_ids"].tolist(), texts, strict=True)):
            marks = [
                name
                for name, on in (
                    ("image", stored["image_mask"][t]),
                    ("loss", stored["loss_mask"][t]),
                    ("fake", not stored["attention_mask"][t]),
                )
                if on
            ]
            positions = stored["position_ids"][..., t].reshape(-1).tolist()
            tokens.append(
                {
                    "position": t,
                    "id": token,
                    "text": text,
                    "position_ids": ",".join(map(str, positions)),
                    "mark": " ".join(marks),
                }
            )
    return {
        "sample": sample,
        "id": entry["id"],
        "status": entry["status"],
        "reason": entry["reason"],
        "length": entry["length"],
        "image_tokens": entry["image_tokens"],
        "loss_tokens": entry["loss_tokens"],
        "max_length": cache.manifest.max_length,
        "tokens": tokens,
    }


def _texts(root: Path, ids: list[int]) -> list[str]:
    from transformers import AutoTokenizer

    folder = target_dir(root)
    if not folder.is_dir():
        raise IncompatibleCacheError(f"{folder}: missing; run the capture again, it writes it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises almost anything on files it cannot read
        raise IncompatibleCacheError(
            f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {error}); delete "
            "this folder and run the capture again, it writes it"
        ) from None
    return [tokenizer.decode([i]) for i in ids]
