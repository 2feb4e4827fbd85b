"""From what a cache stores of a row or batch to the tensors that drafts read."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.schemas.dtypes import FLOAT8_CODE
from dspark.schemas.fields import Field, scale_key
from dspark.schemas.float8 import without_float8
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Batch


def with_decoding_fields(fields: Iterable[Field], manifest: Manifest) -> list[Field]:
    """``fields``, and after them those that are needed to decode them, each once."""
    read = {field.name: field for field in fields}
    names: list[str] = []
    for field in read.values():
        if field.dtype == FLOAT8_CODE:
            names.append(scale_key(field.name))
        if field.where is not None:
            names += [field.where, "input_ids"]
    stored = {field.name: field for field in manifest.all_fields}
    return list((read | {name: stored[name] for name in names}).values())


def decode(stored: Batch, fields: Sequence[Field], embeddings: Tensor) -> Batch:
    """All fields in floats that any draft can read, and for each token.

    Args:
        stored: by name, as read from a cache: a batch, or the tensors of one row (``cache[i]``).
        fields: of these tensors, those of ``with_decoding_fields`` among them.
        embeddings: ``[rows, H]``, what the target's embedding returns for each id (see
            ``TargetHead``), where the tensors are.

    Returns:
        The tensors that are stored as they are, themselves; those in 8 bits as bfloat16, without
        their scales; and ``inputs_embeds`` that were stored at pictures alone with the others, as
        they would have been stored.
    """
    tensors = without_float8(stored)
    for field in fields:
        if field.where is not None:
            ids = tensors["input_ids"]
            text = _real(ids, tensors.get("length")) & ~tensors[field.where].bool()
            tensors[field.name] = _with_text(tensors[field.name], ids, text, embeddings)
    return tensors


def decoded(
    batches: Iterable[Batch], fields: Sequence[Field], embeddings: Tensor
) -> Iterator[Batch]:
    """``decode`` of each batch."""
    return (decode(batch, fields, embeddings) for batch in batches)


def _real(ids: Tensor, length: Tensor | None) -> Tensor:
    """bool: which positions of ``ids`` are no padding; all are in a row on its own."""
    if length is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return torch.arange(ids.shape[1], device=ids.device) < length[:, None]


def _with_text(embeds: Tensor, ids: Tensor, text: Tensor, embeddings: Tensor) -> Tensor:
    """Embeddings ``[…, L, H]`` with those of ``ids`` where ``text``, both ``[…, L]``."""
    of_text = F.embedding(ids.long() * text, embeddings).to(embeds.dtype)
    return torch.where(text[..., None], of_text, embeds)
