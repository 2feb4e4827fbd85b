"""The options of a capture, checked."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.bundled import TARGET, TRAIN_DATA
from dspark.capture.targets.logits_mode import check_logits_option
from dspark.schemas.dtypes import FLOAT_CODES
from dspark.schemas.errors import InputError


@dataclass(frozen=True)
class TargetOptions:
    """How the target is loaded.

    Attributes:
        revision: branch, tag or commit of a Hugging Face repository; None for its default.
        attn_implementation: of transformers, e.g. ``sdpa``, ``eager``, ``flash_attention_2``; None
            for the model's default.
        trust_remote_code: run code that the repository brings along.
        chat_template: file with a chat template to use instead of the processor's.
        device_map: ``auto`` spreads the model over all devices; None puts it on one.
    """

    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    chat_template: Path | None = None
    device_map: str | None = None


@dataclass(frozen=True)
class RowOptions:
    """How rows become tokens, and what happens to those that cannot.

    Attributes:
        image_root: folder that picture paths are relative to; None for the data file's own.
        allow_download: fetch pictures from http(s) addresses.
        mask_reasoning: leave ``<think>…</think>`` of assistant turns unsupervised.
        fake_image: ``auto``, ``always`` or ``never`` give text-only rows a picture that the target
            does not see.
        overlong: ``skip`` or ``truncate`` rows of more than ``--max-length`` tokens.
        on_bad_row: ``skip`` or ``error``.
        max_skipped: share of skipped rows above which a finished capture is an error.
    """

    image_root: Path | None = None
    allow_download: bool = False
    mask_reasoning: bool = False
    fake_image: str = "auto"
    overlong: str = "skip"
    on_bad_row: str = "skip"
    max_skipped: float = 0.1


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
        target_options: how the target is loaded.
        rows: how rows become tokens.
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
    target_options: TargetOptions
    rows: RowOptions

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
        revision: str | None,
        attn_implementation: str | None,
        trust_remote_code: bool,
        chat_template: str | None,
        device_map: str | None,
        image_root: str | None,
        allow_download: bool,
        mask_reasoning: bool,
        fake_image: str,
        overlong: str,
        on_bad_row: str,
        max_skipped: float,
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
        for name, choice, choices in (
            ("--fake-image", fake_image, ("auto", "always", "never")),
            ("--overlong", overlong, ("skip", "truncate")),
            ("--on-bad-row", on_bad_row, ("skip", "error")),
            ("--device-map", device_map or "auto", ("auto",)),
        ):
            if choice not in choices:
                raise InputError(f"{name} {choice}: choose {' or '.join(choices)}")
        if not 0 <= max_skipped <= 1:
            raise InputError(f"--max-skipped {max_skipped}: a share of the rows, from 0 to 1")
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
            target_options=TargetOptions(
                revision=revision,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                chat_template=None if chat_template is None else Path(chat_template),
                device_map=device_map,
            ),
            rows=RowOptions(
                image_root=None if image_root is None else Path(image_root),
                allow_download=allow_download,
                mask_reasoning=mask_reasoning,
                fake_image=fake_image,
                overlong=overlong,
                on_bad_row=on_bad_row,
                max_skipped=max_skipped,
            ),
        )


def _parse_layers(layers: str) -> tuple[int, ...] | None:
    if layers == "auto":
        return None
    if layers == "none":
        return ()
    try:
        return tuple(int(k) for k in layers.split(","))
    except ValueError:
        raise InputError(
            f"--layers {layers}: give auto, none, or layer numbers such as 1,9,17"
        ) from None


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device(device)
