"""The options of a capture, checked."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.bundled import TARGET, TRAIN_DATA
from dspark.capture.options import CaptureOptions
from dspark.capture.targets.logits_mode import check_logits_option
from dspark.schemas.draft_layers import TRAINABLE, parse_drafts
from dspark.schemas.errors import InputError
from dspark.schemas.manifest_check import MOST_SHARDS
from dspark.schemas.options import checked, option_name
from dspark.schemas.shard_format import ZARR
from dspark.schemas.shard_numbers import parse_shards
from dspark.schemas.url import refuse_url

_BATCH_TOKENS = 16384


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
        layers: by their output; None for those that ``drafts`` read.
        drafts: architectures whose layers are stored.
        logits: ``auto``, ``full``, ``topk:k`` or ``head``.
        dtype: ``bf16``, ``fp16``, ``fp32`` or ``fp8``.
        embeds: ``all`` or ``pictures``: the tokens whose ``inputs_embeds`` are stored.
        zarr: whether shards are written in their zarr form.
        batch_tokens: most tokens of a batch, padding included.
        limit: capture only the first rows of the dataset.
        only: shards to capture; None for all.
        overwrite: delete the cache that is there; where it is extended, an unfinished extension.
        tp: workers that share one target by tensor parallelism.
        fsdp: whether the workers of a node share one target by FSDP2.
        num_workers: processes that render rows; None for the machine's.
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
    drafts: tuple[str, ...]
    logits: str
    dtype: str
    embeds: str
    zarr: bool
    batch_tokens: int
    limit: int | None
    only: tuple[int, ...] | None
    overwrite: bool
    tp: int | None
    fsdp: bool
    num_workers: int | None
    device: torch.device
    target_options: TargetOptions
    rows: RowOptions

    @classmethod
    def check(cls, options: CaptureOptions) -> "CaptureSettings":
        """Check options that need neither the target nor the data.

        Raises:
            InputError: one of them is out of range.
        """
        o = checked(options)
        refuse_url("--out", o.out, write=True)
        if o.shards is None:
            raise InputError("--shards: say into how many files the dataset is split, e.g. 4")
        for name in ("shards", "batch_tokens", "max_length", "limit", "tp"):
            value = getattr(o, name)
            if value is not None and value < 1:
                raise InputError(f"{option_name(name)} {value}: must be at least 1")
        if o.shards > MOST_SHARDS:
            raise InputError(f"--shards {o.shards}: a cache has at most {MOST_SHARDS:,}")
        if o.num_workers is not None and o.num_workers < 0:
            raise InputError(f"--num-workers {o.num_workers}: must be at least 0")
        if o.device_map not in (None, "auto"):
            raise InputError(f"--device-map {o.device_map}: choose auto")
        if not 0 <= o.max_skipped <= 1:
            raise InputError(f"--max-skipped {o.max_skipped}: a share of the rows, from 0 to 1")
        if o.drafts is not None and o.layers != "auto":
            raise InputError(
                f"--drafts {o.drafts} and --layers {o.layers} both say which layers to store; give "
                "one of them"
            )
        check_logits_option(o.logits)
        return cls(
            shards=o.shards,
            target=str(TARGET) if o.target is None else o.target,
            data=TRAIN_DATA if o.data is None else Path(o.data),
            out=Path(o.out),
            max_length=o.max_length,
            layers=_parse_layers(o.layers),
            drafts=TRAINABLE if o.drafts is None else parse_drafts(o.drafts),
            logits=o.logits,
            dtype=o.dtype or "bf16",
            embeds=o.embeds or "all",
            zarr=o.format == ZARR,
            batch_tokens=_BATCH_TOKENS if o.batch_tokens is None else o.batch_tokens,
            limit=o.limit,
            only=None if o.only is None else parse_shards(o.only, o.shards),
            overwrite=o.overwrite,
            tp=o.tp,
            fsdp=o.fsdp,
            num_workers=o.num_workers,
            device=_device(o.device),
            target_options=TargetOptions(
                revision=o.revision,
                attn_implementation=o.attn_implementation,
                trust_remote_code=o.trust_remote_code,
                chat_template=None if o.chat_template is None else Path(o.chat_template),
                device_map=o.device_map,
            ),
            rows=RowOptions(
                image_root=None if o.image_root is None else Path(o.image_root),
                allow_download=o.allow_download,
                mask_reasoning=o.mask_reasoning,
                fake_image=o.fake_image,
                overlong=o.overlong or "skip",
                on_bad_row=o.on_bad_row,
                max_skipped=o.max_skipped,
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
