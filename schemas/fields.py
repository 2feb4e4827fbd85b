"""The tensors of a shard: name, type and shape of one row, in the order they lie in the file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.schemas.dtypes import FLOAT_CODES, ITEMSIZE
from dspark.schemas.layers import hidden_state_key

MASKS = ("attention_mask", "loss_mask", "image_mask")
IN_EVERY_CACHE = ("inputs_embeds", "last_hidden_state", "input_ids", "position_ids", *MASKS)
"""What every capture stores, whatever its layers and logits; so no extension adds it."""

FIELDS = "fields"
"""Entry of the identity of a cache that a conversion left fields out of: the names of its fields.
Without this entry, a cache has all fields that its layers and logits ask for."""

KEPT = ("input_ids", "position_ids", *MASKS)
"""What no conversion leaves out."""


@dataclass(frozen=True)
class Field:
    """One stored tensor. A shard of S rows stores it with shape ``[S, *row_shape]``.

    Attributes:
        name: the key in the safetensors file.
        dtype: safetensors code (``BF16``, ``F16``, ``F32``, ``I32``, ``U8``).
        row_shape: shape of one row, padded to ``--max-length`` T along ``token_axis``.
        token_axis: the axis of ``row_shape`` that counts tokens.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    token_axis: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        return math.prod(self.row_shape) * ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one real token."""
        return self.row_bytes // self.row_shape[self.token_axis]

    def extents(self, length: int) -> list[tuple[int, int]]:
        """(offset in the row, bytes) of the runs that hold the first ``length`` tokens."""
        before = math.prod(self.row_shape[: self.token_axis])
        stride = self.row_bytes // before
        return [(i * stride, length * (self.token_bytes // before)) for i in range(before)]

    def document(self, rows: int) -> dict[str, Any]:
        """As the manifest of a cache with ``rows`` rows a shard has it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": [rows, *self.row_shape],
            "token_axis": self.token_axis + 1,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Field":
        """The field of a manifest's entry, unchecked."""
        shape = tuple(document["shape"][1:])
        return cls(document["name"], document["dtype"], shape, document["token_axis"] - 1)


def build_fields(
    *,
    max_length: int,
    hidden_size: int,
    vocab_size: int,
    layers: Sequence[int],
    dtype: str,
    logits: str,
    position_rows: int,
) -> list[Field]:
    """The fields of a cache.

    Wide fields come first, so that their rows begin on disk-block boundaries where sizes allow.

    Args:
        max_length: T, tokens of a padded row.
        hidden_size: H of the target's language backbone.
        vocab_size: V, the width of the target's logits.
        layers: decoder layers to store, by their output (see ``schemas.layers``).
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        logits: ``full``, ``topk:k`` or ``head`` (no logits stored).
        position_rows: 1, or the rows of multi-axis rotary positions (3 for mRoPE).
    """
    code = FLOAT_CODES[dtype]
    t = max_length
    fields = [
        Field("inputs_embeds", code, (t, hidden_size)),
        *(Field(hidden_state_key(k), code, (t, hidden_size)) for k in layers),
        Field("last_hidden_state", code, (t, hidden_size)),
    ]
    if logits == "full":
        fields.append(Field("logits", code, (t, vocab_size)))
    elif logits.startswith("topk:"):
        k = int(logits.removeprefix("topk:"))
        fields += [
            Field("logits_topk.values", code, (t, k)),
            Field("logits_topk.indices", "I32", (t, k)),
            Field("logits_topk.logsumexp", "F32", (t,)),
        ]
    positions = (t,) if position_rows == 1 else (position_rows, t)
    fields += [
        Field("input_ids", "I32", (t,)),
        Field("position_ids", "I32", positions, token_axis=len(positions) - 1),
        *(Field(name, "U8", (t,)) for name in MASKS),
    ]
    return fields
