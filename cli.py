"""The ``dspark`` command: parses, calls, prints. Heavy imports happen inside the commands."""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from dspark.capture.options import CaptureOptions
from dspark.cli_options import options_of
from dspark.convert.options import ConvertOptions
from dspark.reports.text import printable_lines
from dspark.schemas.disk_errors import disk_error
from dspark.schemas.errors import FollowerError, InputError, StoppedError, TooManySkippedError
from dspark.schemas.options import check_given
from dspark.schemas.signals import STOPPING, stop_on_signals
from dspark.train_from_cache.drafts import ARCHITECTURES
from dspark.train_from_cache.options import TrainOptions

_AFTER_A_FINALIZER = 0.05
"""Seconds."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run a frozen vision-language target once, keep what drafts learn from, and train any "
    "number of drafts from it.",
)


def _show_version(asked: bool) -> None:
    if asked:
        import dspark

        typer.echo(f"dspark {dspark.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


_CACHE = typer.Option(help="Cache directory or URL (s3://, gs://, https://, http://, file://).")
_LOCAL_CACHE = typer.Option(
    help="Of a cache at a URL: the folder where fetched shards are kept.",
    show_default="~/.cache/dspark",
)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command("capture")
@options_of(CaptureOptions)
def capture_command(
    options: CaptureOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take: dspark plan.")
    ] = False,
) -> None:
    """Run the frozen target once over conversations and write a cache.

    A capture that was stopped continues when the same command is given again.
    """
    if dry_run:
        _plan(options)
        return
    from dspark.capture.run import run_capture
    from dspark.reports import capture as report

    done = run_capture(replace(options, progress=True))
    if done is not None:  # one worker of a job speaks for all
        typer.echo(report.capture(done))


@app.command("plan")
@options_of(CaptureOptions)
def plan_command(
    options: CaptureOptions,
    exact: Annotated[
        bool, typer.Option("--exact", help="Tokenise every row instead of a sample.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run a few batches, for the time it takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a capture with these options would take, and write nothing.

    Bytes by field and shard, what other options would change, free space, and time.
    """
    _plan(options, exact=exact, measure=measure, as_json=as_json)


def _plan(
    options: CaptureOptions, *, exact: bool = False, measure: bool = False, as_json: bool = False
) -> None:
    from dspark.capture.estimate.run import estimate_capture
    from dspark.reports import plan as report
    from dspark.reports.capture import nothing_to_add

    estimate = estimate_capture(options, exact=exact, measure=measure)
    if as_json:
        document = report.document(estimate) if estimate else report.nothing_to_add()
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(report.plan(estimate) if estimate else nothing_to_add(options.out))


@app.command("convert")
@options_of(ConvertOptions)
def convert_command(options: ConvertOptions) -> None:
    """Write a cache once more with its shards in another form, or with fewer fields.

    A conversion that was stopped continues when the same command is given again.
    """
    from dspark.convert.run import run_convert
    from dspark.reports import conversion as report

    typer.echo(report.conversion(run_convert(replace(options, progress=True))))


@app.command("train-draft")
@options_of(TrainOptions)
def train_draft_command(
    options: TrainOptions,
    cache: Annotated[str, _CACHE],
    arch: Annotated[
        list[str],
        typer.Option(
            help=f"Draft architecture: {', '.join(ARCHITECTURES)}. May be repeated: all are "
            "trained in one pass over the cache."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the draft; of several, for one folder each.",
            show_default="drafts/ARCH",
        ),
    ] = None,
    draft_config: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--draft-config",
            metavar="KEY=VALUE",
            help="Set an entry of the draft's config, e.g. -c block_size=5; may be repeated. Of "
            "several drafts: of all that have it, or of one with -c ARCH.KEY=VALUE.",
            show_default=False,
        ),
    ] = None,
    ttt_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="eagle3: steps of training-time test, and tokens of a round.",
            show_default="7",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="eagle3: the most frequent tokens that the draft knows.",
            show_default="32000, or the target's if smaller",
        ),
    ] = None,
    image_embeds: Annotated[
        str | None,
        typer.Option(
            metavar="merged|token",
            help="eagle3: what the server will feed at picture positions.",
            show_default="merged",
        ),
    ] = None,
) -> None:
    """Train drafts from a cache; the target is never opened."""
    from dspark.reports import training as report
    from dspark.train_from_cache.train import train_draft, train_drafts

    config: dict[str, Any] = dict(_key_value(entry) for entry in draft_config or [])
    for key, value in (
        ("ttt_steps", ttt_steps),
        ("draft_vocab_size", draft_vocab_size),
        ("image_embeds", image_embeds),
    ):
        if value is not None:
            config[key if len(arch) == 1 else f"eagle3.{key}"] = value
    given: dict[str, Any] = {**vars(options), "draft_config": config}
    if len(arch) == 1:
        results = [train_draft(cache=cache, arch=arch[0], out=out, **given)]
    else:
        results = train_drafts(cache, arch, out or "drafts", **given)
    if os.environ.get("RANK", "0") == "0":  # one process speaks for all
        typer.echo("\n\n".join(map(report.training, results)))


def _key_value(entry: str) -> tuple[str, str]:
    key, equals, value = entry.partition("=")
    if not (key and equals):
        raise InputError(f"-c {entry}: give KEY=VALUE, e.g. -c block_size=5")
    return key, value


@app.command("evaluate")
def evaluate_command(
    cache: Annotated[str, _CACHE],
    drafts: Annotated[
        list[str],
        typer.Option(
            "--draft",
            metavar="DIR",
            help="Folder of a draft, trained here or published for vLLM or SGLang; may be "
            "repeated.",
        ),
    ],
    rows: Annotated[
        int | None,
        typer.Option(help="Measure on at most so many rows, evenly spread.", show_default="all"),
    ] = None,
    all_rows: Annotated[
        bool,
        typer.Option("--all-rows", help="Measure on all rows, those trained on too."),
    ] = False,
    eval_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of rows held out, by a hash of the row number.",
            show_default="that of the trainings",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows read at a time.")] = 8,
    zero_hidden_states: Annotated[
        bool,
        typer.Option(
            "--zero-hidden-states",
            help="Give zeros in place of the target's hidden states, as control runs always get.",
        ),
    ] = False,
    local_cache: Annotated[str | None, _LOCAL_CACHE] = None,
    local_cache_size: Annotated[
        str | None,
        typer.Option(
            help="What all shards there may take, e.g. 200GB.",
            show_default="what is free on that disk",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
) -> None:
    """Measure drafts on the same held-out rows and print them side by side."""
    from dspark.reports import evaluation as report
    from dspark.train_from_cache.compare import evaluate_drafts

    found = evaluate_drafts(
        cache,
        drafts,
        rows=rows,
        all_rows=all_rows,
        eval_fraction=eval_fraction,
        batch_size=batch_size,
        zero_hidden_states=zero_hidden_states,
        device=device.value,
        local_cache=local_cache,
        local_cache_size=local_cache_size,
    )
    typer.echo(json.dumps(found, indent=2) if as_json else report.evaluation(found))


@app.command()
def inspect(
    cache: Annotated[str, _CACHE],
    sample: Annotated[
        int | None,
        typer.Option(help="Also show the tokens of this dataset row.", show_default=False),
    ] = None,
    local_cache: Annotated[str | None, _LOCAL_CACHE] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a cache is: fields, bytes, counts, skipped rows. Exit code 1 if it is damaged.

    Of a cache at a URL only the manifest and the indexes are fetched; dspark verify looks at the
    rest.
    """
    from dspark.reports import inspection as report
    from dspark.schemas.url import is_url
    from dspark.train_from_cache.inspection import inspect_cache, inspect_sample
    from dspark.verify.run import verify_cache

    summary = inspect_cache(cache, local_cache)
    verified = None if is_url(cache) else verify_cache(cache)
    faults = [str(fault) for fault in verified.faults] if verified else []
    unreadable = [str(fault) for fault in verified.unreadable] if verified else []
    tokens = None if sample is None else inspect_sample(cache, sample, local_cache)
    if as_json:
        document = {**summary, "faults": faults, "unreadable": unreadable}
        if tokens is not None:
            document["sample"] = tokens
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(report.inspection(summary, faults, unreadable))
        if tokens is not None:
            typer.echo(report.tokens(tokens))
    if verified and verified.faults:
        raise typer.Exit(verified.exit_code)


@app.command()
def verify(
    cache: Annotated[str, _CACHE],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: digests, finite numbers, masks.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="Capture rows again with this target (folder or Hugging Face id) and compare.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --against: the captured conversations.", show_default="where they were"
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="With --against: the --chat-template of the capture.", show_default=False
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --against: run code that the model brings along."
        ),
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="With --against: rows to capture again.", show_default="16"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="With --against: of the choice of rows.", show_default="0"),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Take out what is damaged, so that capture makes just that again."
        ),
    ] = False,
    local_cache: Annotated[
        str | None,
        typer.Option(
            help="Of a cache at a URL: a folder with room for one shard, which is left as it was.",
            show_default="that for temporary files",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a cache. Exit code 0: sound, 1: damaged, 2: cannot tell (unreadable, unfinished)."""
    from dspark.reports import verification as report
    from dspark.schemas.url import refuse_local_cache, refuse_url
    from dspark.verify.repair import repair_cache
    from dspark.verify.run import verify_cache

    check_given(against=against, data=data, chat_template=chat_template)
    of_against = {
        "--data": data,
        "--chat-template": chat_template,
        "--rows": rows,
        "--seed": seed,
        "--trust-remote-code": "" if trust_remote_code else None,
    }
    for option, value in of_against.items():
        if value is not None and against is None:
            said = f"{option} {value}".strip()
            raise InputError(f"{said}: only --against reads it; give --against as well")
    if repair:
        refuse_url("--repair --cache", cache, write=True)
    if against is not None:
        refuse_url("--against --cache", cache, write=False)
    refuse_local_cache(cache, local_cache)
    found = verify_cache(cache, deep=deep, progress=True, local_cache=local_cache)
    if not as_json:
        typer.echo(report.verification(found))
    repaired = compared = None
    try:
        if repair:
            repaired = repair_cache(found)
        if not as_json and (steps := report.next_steps(found, repaired)):
            typer.echo(steps)
        if against is not None and found.manifest is not None:
            from dspark.capture.recapture import prepare_recapture
            from dspark.verify.compare import compare_rows, random_rows

            drawn = random_rows(found, rows or 16, seed or 0)
            again = prepare_recapture(
                found.root,
                found.manifest,
                target=against,
                data=data,
                chat_template=chat_template,
                trust_remote_code=trust_remote_code,
            )
            compared = compare_rows(
                found.root,
                found.manifest,
                drawn,
                again.rows(drawn),
                again.target_differences,
                again.other_differences,
            )
            if not as_json:
                typer.echo(report.comparison(compared))
    except InputError as error:
        if not found.faults:
            raise
        _complain(str(error))  # what was found damaged stays damaged
    if as_json:
        document = report.document(found, repaired, compared)
        typer.echo(json.dumps(document, indent=2))
    raise typer.Exit(1 if compared is not None and compared.differs else found.exit_code)


def _run(command: Callable[[], Any]) -> int:
    """Run a command; errors that a user can mend become one sentence on stderr."""
    try:
        command()
    except InputError as error:
        _complain(str(error))
        return 2
    except TooManySkippedError as error:
        _complain(str(error))
        return 1
    except FollowerError:
        return 1
    except StoppedError as error:
        _end_by_signals()
        one_of_many = os.environ.get("WORLD_SIZE", "1") != "1"
        print(
            f"dspark: {error}"
            + (
                " (torchrun sends SIGTERM to all workers when one fails; it says below which)"
                if one_of_many and error.exit_code == 128 + signal.SIGTERM
                else ""
            )
            + "; what is committed stays, and the same command continues (train-draft: with "
            "--resume)",
            file=sys.stderr,
        )
        return error.exit_code
    except OSError as error:
        if (said := disk_error(error)) is None:
            raise
        _complain(said)
        return 1
    return 0


def _complain(message: str) -> None:
    print(f"dspark: {printable_lines(message)}", file=sys.stderr)


def _stop_later(unraisable: "sys.UnraisableHookArgs") -> None:
    """A signal that met Python in a finalizer, which cannot raise, comes again after it."""
    if isinstance(unraisable.exc_value, StoppedError):
        again = os.getpid(), unraisable.exc_value.exit_code - 128
        threading.Timer(_AFTER_A_FINALIZER, os.kill, again).start()
    else:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Entry point of the ``dspark`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    sys.unraisablehook = _stop_later
    stop_on_signals()
    code = _run(app)
    _end_by_signals()
    sys.exit(code)


def _end_by_signals() -> None:
    """From now on SIGINT and SIGTERM end the process at once: there is nothing left to stop."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
