"""Fields that were added to a finished cache: what the manifest says of them."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.schemas.fields import IN_EVERY_CACHE, Field, build_fields

AROUND = ("device", "tensor_parallel", "torch", "transformers")
"""Entries of the identity that an extension may have otherwise than its cache: they change how
floats are rounded, and nothing else."""


@dataclass(frozen=True)
class Extension:
    """One file beside each shard, with the fields of some layers, of logits, or of both.

    Attributes:
        layers: captured layers by output.
        logits: ``full`` or ``topk:k``; None where no logits were added.
        fields: the stored tensors, in file order.
        shard_bytes: size of each file, holes included.
        around: the entries ``AROUND`` of its identity; all others are those of the cache.
        complete: whether every shard has its file.
    """

    layers: tuple[int, ...]
    logits: str | None
    fields: tuple[Field, ...]
    shard_bytes: int
    around: dict[str, Any]
    complete: bool = False

    def document(self, rows_per_shard: int) -> dict[str, Any]:
        """As the manifest has it."""
        return {
            "complete": self.complete,
            "layers": layers_document(self.layers),
            "logits": self.logits,
            "fields": [f.document(rows_per_shard) for f in self.fields],
            "shard_bytes": self.shard_bytes,
            "identity": self.around,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Extension":
        """The extension of a document, unchecked (see ``manifest_check``)."""
        return cls(
            layers=tuple(document["layers"]["output_of_layer"]),
            logits=document["logits"],
            fields=tuple(map(Field.from_document, document["fields"])),
            shard_bytes=document["shard_bytes"],
            around=document["identity"],
            complete=document["complete"],
        )

    def check_types(self) -> None:
        """Check what the checks of a whole part take for granted.

        Raises:
            TypeError: an entry is of another type.
            ValueError: the identity has other entries.
        """
        if type(self.complete) is not bool:
            raise TypeError(f"extensions: complete is {reprlib.repr(self.complete)}")
        if self.logits is not None and not (
            type(self.logits) is str and re.fullmatch(r"full|topk:[1-9]\d{0,9}", self.logits)
        ):
            raise ValueError(f"extensions: logits is {reprlib.repr(self.logits)}")
        if type(self.around) is not dict or sorted(self.around) != sorted(AROUND):
            raise ValueError(f"extensions: identity is {reprlib.repr(self.around)}")
        for name, value in self.around.items():
            if type(value) is not (int if name == "tensor_parallel" else str):
                raise TypeError(f"extensions: identity.{name} is {reprlib.repr(value)}")
        if not self.fields:
            raise ValueError("extensions: one adds no field")


def layers_document(layers: Sequence[int]) -> dict[str, list[int]]:
    """Layers in both conventions."""
    return {"output_of_layer": list(layers), "huggingface_index": [k + 1 for k in layers]}


def added_fields(
    *,
    max_length: int,
    hidden_size: int,
    vocab_size: int,
    layers: Sequence[int],
    dtype: str,
    logits: str | None,
) -> list[Field]:
    """The fields of an extension: those of a cache (see ``build_fields``) that not each has."""
    fields = build_fields(
        max_length=max_length,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=layers,
        dtype=dtype,
        logits=logits or "head",
        position_rows=1,
    )
    return [field for field in fields if field.name not in IN_EVERY_CACHE]
