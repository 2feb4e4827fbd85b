"""The ``dspark`` command: parses, calls, prints. Heavy imports happen inside the commands."""

import errno
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dspark.schemas.errors import InputError, TooManySkippedError
from dspark.train_from_cache.drafts import ARCHITECTURES


class _StoppedError(Exception):
    """Ctrl-C in a command."""


class _Commands(TyperGroup):
    """The commands; typer itself would end silently at Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _StoppedError from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run a frozen vision-language target once, keep what drafts learn from, and train any "
    "number of drafts from it.",
)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@app.command("capture")
def capture_command(
    shards: Annotated[int, typer.Option(help="Files to split the dataset into.")],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id of the model.", show_default="bundled"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Conversations: a file, folder or glob (Parquet, JSON Lines, JSON, Arrow), or a "
            "dataset of Hugging Face (saved, or id:split).",
            show_default="bundled",
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="Cache directory.")] = "cache",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a padded row; see --overlong. Padding takes no disk.",
            show_default="2048, or the target's limit if lower",
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Decoder layers to store, by their output (0-based; -1 is what layer 0 receives), "
            "e.g. 1,9,17; auto stores what the built-in drafts read."
        ),
    ] = "auto",
    logits: Annotated[
        str,
        typer.Option(
            help="full, topk:K, or head (none stored: recomputed with the stored head, proved "
            "exact); auto stores them where they cost no more than the rest."
        ),
    ] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type of the stored floats.")] = Dtype.bf16,
    batch_tokens: Annotated[
        int, typer.Option(help="Most tokens of a batch, padding included.")
    ] = 16384,
    limit: Annotated[
        int | None, typer.Option(help="Capture only the first rows.", show_default="all")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the target runs.")] = Device.auto,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto spreads the model over all devices.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a Hugging Face id.", show_default=False),
    ] = None,
    attn_implementation: Annotated[
        str | None,
        typer.Option(help="Of transformers: sdpa, eager, flash_attention_2, …", show_default=False),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings along.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(help="File with a chat template to use instead.", show_default=False),
    ] = None,
    image_root: Annotated[
        str | None,
        typer.Option(
            help="Folder that picture paths are relative to.", show_default="that of --data"
        ),
    ] = None,
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="Fetch pictures from http(s) addresses.")
    ] = False,
    mask_reasoning: Annotated[
        bool, typer.Option("--mask-reasoning", help="Leave <think>…</think> unsupervised.")
    ] = False,
    fake_image: Annotated[
        str,
        typer.Option(
            help="auto, always or never give text-only rows a picture that the target does not "
            "see; auto where the target's sharding needs it."
        ),
    ] = "auto",
    overlong: Annotated[
        str,
        typer.Option(
            help="skip or truncate rows of more than --max-length tokens; a picture is never cut."
        ),
    ] = "skip",
    on_bad_row: Annotated[
        str, typer.Option(help="skip bad rows with their reason, or stop with an error.")
    ] = "skip",
    max_skipped: Annotated[
        float, typer.Option(help="Share of skipped rows above which the capture has failed.")
    ] = 0.1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")
    ] = False,
) -> None:
    """Run the frozen target once over conversations and write a cache.

    A capture that was stopped continues when the same command is given again.
    """
    from dspark import report

    options: dict[str, Any] = {
        "shards": shards,
        "target": target,
        "data": data,
        "out": out,
        "max_length": max_length,
        "layers": layers,
        "logits": logits,
        "dtype": dtype.value,
        "batch_tokens": batch_tokens,
        "limit": limit,
        "device": device.value,
        "device_map": device_map,
        "revision": revision,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "chat_template": chat_template,
        "image_root": image_root,
        "allow_download": allow_download,
        "mask_reasoning": mask_reasoning,
        "fake_image": fake_image,
        "overlong": overlong,
        "on_bad_row": on_bad_row,
        "max_skipped": max_skipped,
    }
    if dry_run:
        from dspark.capture.dry_run import dry_run as run_dry
        from dspark.capture.settings import CaptureSettings

        typer.echo(report.dry_run(run_dry(CaptureSettings.check(**options))))
        return
    from dspark.capture.run import capture

    typer.echo(report.capture(capture(**options, progress=True)))


@app.command("train-draft")
def train_draft_command(
    cache: Annotated[str, typer.Option(help="Cache directory.")],
    arch: Annotated[str, typer.Option(help=f"Draft architecture: {', '.join(ARCHITECTURES)}.")],
    out: Annotated[
        str | None,
        typer.Option(help="Folder for the draft.", show_default="drafts/ARCH"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Updates to do; instead of --epochs.", show_default=False)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the training rows.", show_default="10")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of an update.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-4,
    warmup: Annotated[float, typer.Option(help="Share of the steps that warm up.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of weights, order and all else that is random.")] = 0,
    eval_fraction: Annotated[
        float, typer.Option(help="Share of rows held out, by a hash of the row number.")
    ] = 0.1,
    curriculum: Annotated[
        bool, typer.Option("--curriculum", help="Text-only rows first, then ramp in pictures.")
    ] = False,
    zero_hidden_states: Annotated[
        bool,
        typer.Option(
            "--zero-hidden-states",
            help="Control run: the draft sees zeros in place of the target's hidden states.",
        ),
    ] = False,
    draft_config: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--draft-config",
            metavar="KEY=VALUE",
            help="Set an entry of the draft's config, e.g. -c block_size=5; may be repeated.",
            show_default=False,
        ),
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between saves for --resume.")] = 500,
    log_every: Annotated[int, typer.Option(help="Steps between log records.")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training in --out.")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where to train.")] = Device.auto,
) -> None:
    """Train a draft from a cache; the target is never opened."""
    from dspark import report
    from dspark.train_from_cache.train import train_draft

    result = train_draft(
        cache,
        arch,
        out,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        warmup=warmup,
        seed=seed,
        eval_fraction=eval_fraction,
        curriculum=curriculum,
        zero_hidden_states=zero_hidden_states,
        draft_config=dict(_key_value(entry) for entry in draft_config or []),
        save_every=save_every,
        log_every=log_every,
        resume=resume,
        device=device.value,
    )
    typer.echo(report.training(result))


def _key_value(entry: str) -> tuple[str, str]:
    key, equals, value = entry.partition("=")
    if not (key and equals):
        raise InputError(f"-c {entry}: give KEY=VALUE, e.g. -c block_size=5")
    return key, value


@app.command()
def inspect(
    cache: Annotated[str, typer.Option(help="Cache directory.")],
    sample: Annotated[
        int | None,
        typer.Option(help="Also show the tokens of this dataset row.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a cache is: fields, bytes, counts, skipped rows."""
    from dspark import report
    from dspark.train_from_cache.inspection import inspect_cache, inspect_sample

    summary = inspect_cache(cache)
    tokens = None if sample is None else inspect_sample(cache, sample)
    if as_json:
        document = summary if tokens is None else {**summary, "sample": tokens}
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(report.inspection(summary))
        if tokens is not None:
            typer.echo(report.tokens(tokens))


def _run(command: Callable[[], Any]) -> int:
    """Run a command; errors that a user can mend become one sentence on stderr."""
    try:
        command()
    except InputError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 2
    except TooManySkippedError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 1
    except (_StoppedError, KeyboardInterrupt):
        print(
            "dspark: stopped; what is committed stays, and the same command continues "
            "(train-draft: with --resume)",
            file=sys.stderr,
        )
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(
            f"dspark: {error.strerror}{where}; what is committed stays: make room or mend the "
            "permissions and give the same command again (train-draft: with --resume)",
            file=sys.stderr,
        )
        return 1
    return 0


def main() -> None:
    """Entry point of the ``dspark`` command."""
    sys.exit(_run(app))


if __name__ == "__main__":
    main()
