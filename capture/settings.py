"""The options of a capture, checked."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.bundled import TARGET, TRAIN_DATA
from dspark.capture.logits import check_logits_option
from dspark.schemas.dtypes import FLOAT_CODES
from dspark.schemas.errors import InputError


@dataclass(frozen=True)
class CaptureSettings:
    """What ``dspark capture`` was asked for.

    Attributes:
        shards: N, files that the dataset is split into.
        target: folder or Hugging Face id of the model.
        data: file of conversations.
        out: cache directory.
        max_length: T, tokens of a padded row; None takes 2048, or the target's limit if lower.
        layers: None for the union of what the built-in drafts read, else layers by their output.
        logits: ``auto``, ``full``, ``topk:k`` or ``head``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        batch_tokens: most tokens of a batch, padding included.
        limit: capture only the first rows of the dataset.
        device: where the target runs.
    """

    shards: int
    target: str
    data: Path
    out: Path
    max_length: int | None
    layers: tuple[int, ...] | None
    logits: str
    dtype: str
    batch_tokens: int
    limit: int | None
    device: torch.device

    @classmethod
    def check(
        cls,
        *,
        shards: int,
        target: str | None,
        data: str | None,
        out: str,
        max_length: int | None,
        layers: str,
        logits: str,
        dtype: str,
        batch_tokens: int,
        limit: int | None,
        device: str,
    ) -> "CaptureSettings":
        """Check options that need neither the target nor the data.

        Raises:
            InputError: one of them is out of range.
        """
        for name, value in (
            ("--shards", shards),
            ("--batch-tokens", batch_tokens),
            ("--max-length", max_length),
            ("--limit", limit),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: must be at least 1")
        if dtype not in FLOAT_CODES:
            raise InputError(f"--dtype {dtype}: choose {', '.join(FLOAT_CODES)}")
        check_logits_option(logits)
        return cls(
            shards=shards,
            target=str(TARGET) if target is None else target,
            data=TRAIN_DATA if data is None else Path(data),
            out=Path(out),
            max_length=max_length,
            layers=_parse_layers(layers),
            logits=logits,
            dtype=dtype,
            batch_tokens=batch_tokens,
            limit=limit,
            device=_device(device),
        )


def _parse_layers(layers: str) -> tuple[int, ...] | None:
    if layers == "auto":
        return None
    try:
        return tuple(int(k) for k in layers.split(","))
    except ValueError:
        raise InputError(f"--layers {layers}: give auto, or layer numbers such as 1,9,17") from None


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device(device)
