"""The two forms of a shard: one safetensors file, or one zarr group."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAFETENSORS = "safetensors"
ZARR = "zarr"
LEVELS = {"zstd": range(1, 23), "lz4": range(1, 10), "none": None}
"""Codecs of the zarr form, and the levels that each has."""

DEFAULT_CODEC = "zstd"
DEFAULT_LEVELS = {"zstd": 1, "lz4": 5, "none": None}


@dataclass(frozen=True)
class ShardFormat:
    """How the shards of a cache are stored. It changes no stored number, so no identity has it.

    Attributes:
        name: ``safetensors`` or ``zarr``.
        codec: of the zarr form: ``zstd``, ``lz4`` (bits shuffled) or ``none``; None otherwise.
        level: of ``zstd`` and ``lz4``; None otherwise.
    """

    name: str = SAFETENSORS
    codec: str | None = None
    level: int | None = None

    @classmethod
    def zarr(cls, codec: str | None = None, level: int | None = None) -> "ShardFormat":
        """The zarr form, with defaults for what is None; unchecked."""
        codec = DEFAULT_CODEC if codec is None else codec
        return cls(ZARR, codec, DEFAULT_LEVELS[codec] if level is None else level)

    @property
    def is_zarr(self) -> bool:
        return self.name == ZARR

    def __str__(self) -> str:
        """``safetensors``, ``zarr (zstd 1)`` or ``zarr (none)``."""
        if not self.is_zarr:
            return self.name
        return f"{self.name} ({self.codec}{'' if self.level is None else f' {self.level}'})"

    def document(self) -> dict[str, Any]:
        """As the manifest has it."""
        if not self.is_zarr:
            return {"name": self.name}
        return {"name": self.name, "codec": self.codec, "level": self.level}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "ShardFormat":
        """The form of a manifest's entry, unchecked."""
        return cls(**document)

    def check(self) -> None:
        """Check the values.

        Raises:
            ValueError: there is no such form.
        """
        if self == ShardFormat():
            return
        known = self.is_zarr and type(self.codec) is str and self.codec in LEVELS
        levels = LEVELS[self.codec] if known and self.codec else None
        right = self.level is None if levels is None else type(self.level) is int
        if not (known and right and (levels is None or self.level in levels)):
            raise ValueError(f"shard_format is {reprlib.repr(self.document())}")
