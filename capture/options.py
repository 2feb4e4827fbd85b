"""What a capture can be asked for: every option, said once."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from dspark.schemas.draft_layers import DRAFTS
from dspark.schemas.options import Help


@dataclass(frozen=True)
class CaptureOptions:
    """The options of ``dspark capture``, unchecked; see ``settings`` for the checked ones."""

    shards: Annotated[
        int | None,
        Help("Files to split the dataset into; needed but with --extend.", default=False),
    ] = None
    _: KW_ONLY
    target: Annotated[
        str | None, Help("Folder or Hugging Face id of the model.", default="bundled")
    ] = None
    data: Annotated[
        str | None,
        Help(
            "Conversations: a file, folder or glob (Parquet, JSON Lines, JSON, Arrow), or a "
            "dataset of Hugging Face (saved, or id:split).",
            default="bundled",
        ),
    ] = None
    out: Annotated[str, Help("Cache directory.")] = "cache"
    max_length: Annotated[
        int | None,
        Help(
            "Tokens of a padded row; see --overlong. Padding takes no disk.",
            default="2048, or the target's limit if lower",
        ),
    ] = None
    layers: Annotated[
        str,
        Help(
            "Decoder layers to store, by their output (0-based; -1 is what layer 0 receives), "
            "e.g. 1,9,17; auto stores what the built-in drafts read."
        ),
    ] = "auto"
    drafts: Annotated[
        str | None,
        Help(
            "Instead of --layers: store the layers that these drafts read, e.g. msd,eagle3; known "
            f"are {', '.join(DRAFTS)}.",
            default=False,
        ),
    ] = None
    logits: Annotated[
        str,
        Help(
            "full, topk:K, or head (none stored: recomputed with the stored head, proved exact); "
            "auto stores them where they cost no more than the rest."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "fp8"] | None,
        Help(
            "Type of the stored floats; fp8 takes 8 bits a number, with a scale a token, for "
            "embeddings and hidden states, and bf16 for the last hidden state and logits.",
            default="bf16",
        ),
    ] = None
    embeds: Annotated[
        Literal["all", "pictures"] | None,
        Help(
            "Which tokens' inputs_embeds to store; pictures leaves out those of text, which a "
            "trainer looks up in the stored embedding table (proved exact at each token).",
            default="all",
        ),
    ] = None
    format: Annotated[
        Literal["safetensors", "zarr"] | None,
        Help(
            "Form of the shards: safetensors is the fast one, zarr the compressed one for object "
            "storage.",
            default="safetensors; with --extend, the cache's",
        ),
    ] = None
    batch_tokens: Annotated[
        int | None, Help("Most tokens of a batch, padding included.", default="16384")
    ] = None
    limit: Annotated[int | None, Help("Capture only the first rows.", default="all")] = None
    only: Annotated[
        str | None,
        Help(
            "Capture only these shards, e.g. 3,7-9, and leave the others to other jobs.",
            default=False,
        ),
    ] = None
    extend: Annotated[
        bool,
        Help(
            "Add the layers and logits asked for to the finished cache in --out; all other options "
            "are those of its capture."
        ),
    ] = False
    overwrite: Annotated[
        bool,
        Help(
            "Delete the cache in --out, if there is one, and start anew; with --extend, only an "
            "unfinished extension."
        ),
    ] = False
    num_workers: Annotated[
        int | None,
        Help(
            "Processes beside the target that read, render and tokenise; 0 leaves it to the "
            "capturing process.",
            default="cores - 1, at most 8",
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Help("Where the target runs.")] = "auto"
    device_map: Annotated[
        str | None,
        Help("auto spreads the model over all devices of one process.", default=False),
    ] = None
    tp: Annotated[
        int | None,
        Help(
            "Under torchrun: split the target over so many workers (tensor parallel).",
            default=False,
        ),
    ] = None
    fsdp: Annotated[
        bool, Help("Under torchrun: split the target over the workers of each node (FSDP2).")
    ] = False
    revision: Annotated[
        str | None, Help("Branch, tag or commit of a Hugging Face id.", default=False)
    ] = None
    attn_implementation: Annotated[
        str | None, Help("Of transformers: sdpa, eager, flash_attention_2, …", default=False)
    ] = None
    trust_remote_code: Annotated[bool, Help("Run code that the model brings along.")] = False
    chat_template: Annotated[
        str | None, Help("File with a chat template to use instead.", default=False)
    ] = None
    image_root: Annotated[
        str | None, Help("Folder that picture paths are relative to.", default="that of --data")
    ] = None
    allow_download: Annotated[bool, Help("Fetch pictures from http(s) addresses.")] = False
    mask_reasoning: Annotated[bool, Help("Leave <think>…</think> unsupervised.")] = False
    fake_image: Annotated[
        Literal["auto", "always", "never"],
        Help(
            "Give text-only rows a picture that the target does not see; auto gives none, since "
            "--fsdp does without."
        ),
    ] = "auto"
    overlong: Annotated[
        Literal["skip", "truncate"] | None,
        Help("Rows of more than --max-length tokens; a picture is never cut.", default="skip"),
    ] = None
    on_bad_row: Annotated[
        Literal["skip", "error"], Help("Skip bad rows with their reason, or stop.")
    ] = "skip"
    max_skipped: Annotated[
        float, Help("Share of skipped rows above which the capture has failed.")
    ] = 0.1
    progress: bool = False
