"""What a training can be asked for: every option, said once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from dspark.schemas.options import Help

Location: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of ``dspark train-draft`` beside what is trained where, unchecked.

    Attributes:
        draft_config: entries of the draft's config to set; text is read as the entry's type.
        progress: show a progress bar, or lines, on stderr.
    """

    init_from: Annotated[
        Location | None,
        Help(
            "Start from the draft in this folder: one trained here, or one published for vLLM or "
            "SGLang. Its config is the new draft's.",
            default="fresh weights",
        ),
    ] = None
    steps: Annotated[int | None, Help("Updates to do; instead of --epochs.", default=False)] = None
    epochs: Annotated[
        float | None,
        Help("Passes over the training rows, rounded up to whole steps.", default="10"),
    ] = None
    batch_size: Annotated[int, Help("Rows of an update.")] = 8
    accumulate: Annotated[
        int, Help("Parts that an update's rows are taken in, one after the other, to save memory.")
    ] = 1
    lr: Annotated[
        float, Help("Peak learning rate, after which it falls along a cosine to a tenth.")
    ] = 3e-4
    warmup: Annotated[float, Help("Share of the steps in which the learning rate rises.")] = 0.05
    ema: Annotated[
        float | None,
        Help(
            "Average the weights over the updates with this decay, e.g. 0.999; the average is the "
            "draft.",
            default=False,
        ),
    ] = None
    seed: Annotated[int, Help("Of weights, order and anchors; not of the held-out rows.")] = 0
    eval_fraction: Annotated[
        float, Help("Share of rows held out, by a hash of the row number; 0 for none.")
    ] = 0.1
    curriculum: Annotated[bool, Help("Text-only rows first, rows with pictures later (MSD).")] = (
        False
    )
    bucket: Annotated[
        bool, Help("Batches of rows of like length: less padding, in another order.")
    ] = False
    zero_hidden_states: Annotated[
        bool, Help("A control: the draft gets zeros for the target's hidden states.")
    ] = False
    draft_config: Mapping[str, Any] | None = None
    save_every: Annotated[int, Help("Steps between two saves of the training state.")] = 500
    log_every: Annotated[int, Help("Steps between two log records.")] = 10
    resume: Annotated[bool, Help("Go on with the training in --out.")] = False
    check_digests: Annotated[
        bool, Help("Compare all that is read with its digest; stop at damage.")
    ] = False
    local_cache: Annotated[
        Location | None,
        Help(
            "Of a cache at a URL: the folder where fetched shards are kept.",
            default="~/.cache/dspark",
        ),
    ] = None
    local_cache_size: Annotated[
        str | None,
        Help("What all shards there may take, e.g. 200GB.", default="what is free on that disk"),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Help("Where to train.")] = "auto"
    fsdp: Annotated[bool, Help("Under torchrun: shard the draft over the processes (FSDP2).")] = (
        False
    )
    trim: Annotated[
        bool,
        Help(
            "Cut each batch to its longest row. Otherwise all have the --max-length of the cache: "
            "one shape, which is compiled once and whose memory is known from the first step on."
        ),
    ] = False
    compile: Annotated[bool, Help("Compile the draft's forward pass (torch.compile).")] = False
    track: Annotated[
        Literal["wandb"] | None,
        Help("Also send the curves there: wandb (Weights & Biases).", default=False),
    ] = None
    progress: bool = True


@dataclass(frozen=True)
class TrainTask(TrainOptions):
    """One draft to train.

    Attributes:
        cache: a finished cache: its directory or URL.
        arch: name of the draft.
        out: folder for everything that comes out (see ``outputs.py``); ``drafts/ARCH`` by default.
    """

    cache: Location
    arch: str
    out: Location | None = None
