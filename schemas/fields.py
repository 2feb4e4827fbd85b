"""The tensors of a shard: name, type and shape of one row, in the order they lie in the file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.schemas.dtypes import FLOAT8_CODE, FLOAT_CODES, ITEMSIZE
from dspark.schemas.layers import hidden_state_key

SCALE = ".scale"
"""What the name of a field of scales ends with."""

MASKS = ("attention_mask", "loss_mask", "image_mask")
IN_EVERY_CACHE = (
    *("inputs_embeds", "inputs_embeds.scale", "last_hidden_state", "input_ids", "position_ids"),
    *MASKS,
)
"""What a capture stores whatever its layers and logits; so no extension adds it."""

FIELDS = "fields"
"""Entry of the identity of a cache that a conversion left fields out of: the names of its fields.
Without this entry, a cache has all fields that its layers and logits ask for."""

KEPT = ("input_ids", "position_ids", *MASKS)
"""What no conversion leaves out."""


def scale_key(name: str) -> str:
    """The name of the field with the scales of an 8-bit field (see ``schemas.float8``)."""
    return name + SCALE


def is_scale(name: str) -> bool:
    """Whether a field holds the scales of another."""
    return name.endswith(SCALE)


@dataclass(frozen=True)
class Field:
    """One stored tensor. A shard of S rows stores it with shape ``[S, *row_shape]``.

    Attributes:
        name: the key in the safetensors file.
        dtype: safetensors code (``BF16``, ``F16``, ``F32``, ``F8_E4M3``, ``I32``, ``U8``).
        row_shape: shape of one row, padded to ``--max-length`` T along ``token_axis``.
        token_axis: the axis of ``row_shape`` that counts tokens.
        where: the mask that is 1 at the tokens that are stored, or None where all are. The others
            are zero, and holes in the file.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    token_axis: int = 0
    where: str | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included."""
        return math.prod(self.row_shape) * ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one real token."""
        return self.row_bytes // self.row_shape[self.token_axis]

    def real_bytes(self, tokens: int, image_tokens: int) -> int:
        """Bytes that are stored of rows with so many real tokens, so many of them of pictures."""
        return self.token_bytes * (tokens if self.where is None else image_tokens)

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
            **({} if self.where is None else {"where": self.where}),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Field":
        """The field of a manifest's entry, unchecked."""
        return cls(
            document["name"],
            document["dtype"],
            tuple(document["shape"][1:]),
            document["token_axis"] - 1,
            document.get("where"),
        )


def build_fields(
    *,
    max_length: int,
    hidden_size: int,
    vocab_size: int,
    layers: Sequence[int],
    dtype: str,
    logits: str,
    position_rows: int,
    embeds: str = "all",
) -> list[Field]:
    """The fields of a cache.

    Wide fields come first, so that their rows begin on disk-block boundaries where sizes allow.

    Args:
        max_length: T, tokens of a padded row.
        hidden_size: H of the target's language backbone.
        vocab_size: V, the width of the target's logits.
        layers: decoder layers to store, by their output (see ``schemas.layers``).
        dtype: ``bf16``, ``fp16``, ``fp32`` or ``fp8``.
        logits: ``full``, ``topk:k`` or ``head`` (no logits stored).
        position_rows: 1, or the rows of multi-axis rotary positions (3 for mRoPE).
        embeds: ``all`` stores ``inputs_embeds`` of each token, ``pictures`` where a picture is.
    """
    code = FLOAT_CODES[dtype]
    t = max_length
    features = ("inputs_embeds", *map(hidden_state_key, layers))
    feature_code = FLOAT8_CODE if dtype == "fp8" else code
    where = "image_mask" if embeds == "pictures" else None
    fields = [
        Field("inputs_embeds", feature_code, (t, hidden_size), where=where),
        *(Field(name, feature_code, (t, hidden_size)) for name in features[1:]),
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
    if dtype == "fp8":
        fields += [Field(scale_key(name), "F32", (t,)) for name in features]
    positions = (t,) if position_rows == 1 else (position_rows, t)
    fields += [
        Field("input_ids", "I32", (t,)),
        Field("position_ids", "I32", positions, token_axis=len(positions) - 1),
        *(Field(name, "U8", (t,)) for name in MASKS),
    ]
    return fields
