"""Stage 1 from end to end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dspark.capture.background import BackgroundWriter
from dspark.capture.conversations import Conversations, open_conversations
from dspark.capture.extension.plan import plan_extension
from dspark.capture.extension.prepare import finish_extension, prepare_extension
from dspark.capture.extension.request import ExtensionRequest, extension_request
from dspark.capture.extension.shard import ExtendedShard
from dspark.capture.finish import finish, missing_shards
from dspark.capture.new_shard import NewShard
from dspark.capture.options import CaptureOptions
from dspark.capture.plan import CapturePlan, plan_capture
from dspark.capture.prepare import check_out, prepare
from dspark.capture.progress import CaptureProgress, Step
from dspark.capture.rendering.pool import RenderingPool, default_workers
from dspark.capture.settings import CaptureSettings
from dspark.capture.shard import ShardCapture
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.skipped import SkippedKind, skipped_table
from dspark.capture.targets.loading import load_processor, load_target
from dspark.capture.targets.target import Target
from dspark.capture.workers.job import Job
from dspark.capture.workers.lockstep import lock_step
from dspark.capture.workers.replica import find_replica
from dspark.capture.zarr_writer import shard_writer
from dspark.schemas.claims import ClaimedError
from dspark.schemas.errors import InputError, TooManySkippedError
from dspark.schemas.manifest import Manifest, write_manifest
from dspark.schemas.options import takes
from dspark.schemas.paths import CachePaths, manifest_path
from dspark.schemas.stored_shard import is_committed


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did.

    Attributes:
        root: the cache.
        manifest: of the cache; not complete if shards are missing.
        missing: shards that other jobs have to capture, or are capturing now.
        shards_written: by this job; 0 if the cache was complete already.
        bytes_written: by this job, of real tokens, before any compression.
        skipped: rows that could not be captured, by reason; of the finished cache.
        rewritten: other parts of the cache that this job wrote.
        added: fields that were asked for, of an extension; None for a capture.
    """

    root: Path
    manifest: Manifest
    missing: tuple[int, ...]
    shards_written: int
    bytes_written: int
    skipped: tuple[SkippedKind, ...]
    rewritten: tuple[str, ...] = ()
    added: tuple[str, ...] | None = None


def run_capture(options: CaptureOptions) -> CaptureReport | None:
    """Run a frozen VLM once over conversations and write a cache; what ``dspark capture`` does.

    A capture that was stopped continues with its missing shards when called again. The arguments
    are the fields of ``capture.options.CaptureOptions``.

    Returns:
        A report; None in all workers of a job but the first.

    Raises:
        InputError: an option, the target, the data or the output directory is not usable.
        TooManySkippedError: the cache is finished, and more rows than ``max_skipped`` were skipped.
        FollowerError: another worker of the job failed before, and has said why.
    """
    with Job.join() as job, ExitStack() as stack:
        request = extension_request(options) if options.extend else None
        if request is not None and request.adds_nothing:
            return _nothing_to_add(request) if job.is_first else None
        settings = CaptureSettings.check(options) if request is None else request.settings
        check_out(settings.out)
        device = job.device(settings.device)
        replica = find_replica(settings.tp, settings.fsdp, settings.target_options.device_map)
        if replica is not None:
            replica.connect(job.store, device)
        workers = settings.num_workers
        if workers is None:
            workers = default_workers()
        conversations = open_conversations(settings.data, settings.rows, readers=max(1, workers))
        processor = load_processor(settings.target, settings.target_options)
        pool = stack.enter_context(RenderingPool(workers, conversations, processor))
        target = load_target(
            settings.target, device, settings.target_options, replica, loaded=processor
        )
        if request is None:
            plan = plan_capture(settings, target, conversations)
        else:
            plan = plan_extension(request, target, conversations)
        manifest = plan.manifest
        committed_before: Sequence[int] = ()
        rewritten: tuple[str, ...] = ()
        if job.is_first:
            if request is None:
                manifest, committed_before, rewritten = prepare(
                    settings, plan, target, conversations
                )
            else:
                committed_before = prepare_extension(request, plan)
            job.announce(manifest.identity_hash)
        elif job.wait_until_prepared() != manifest.identity_hash:
            raise InputError(
                f"worker {job.rank} would not capture the same numbers as the first one: its "
                "target, data, device or library versions are others; start all workers on equal "
                "machines with the same files"
            )
        paths = CachePaths(settings.out, settings.shards, plan.part)
        open_shard = _shards(request, plan, target, conversations)
        step = lock_step(replica, target)
        mine = _claims(job, settings, plan, paths) if step.writes else iter(())

        def draw() -> tuple[NewShard, ShardWriter | None] | None:
            drawn, writer = next(mine, (None, None))
            number = step.agree(drawn)
            return None if number is None else (open_shard(number), writer)

        with CaptureProgress(job, manifest, committed_before, show=options.progress) as progress:
            with BackgroundWriter(paths, progress) as background:
                ShardCapture(target, pool, background, step, progress).run(draw)
            step.drain()
            progress.report()
            job.done()
            if not job.is_first:
                return None
            job.wait_for_all(meanwhile=progress.report)
            progress.report()
        if request is not None:
            return _finish_extension(request, plan, paths, progress.done)
        return _finish(settings, manifest, paths, progress.done, rewritten)


def _shards(
    request: ExtensionRequest | None,
    plan: CapturePlan,
    target: Target,
    conversations: Conversations,
) -> Callable[[int], NewShard]:
    """What gives the rows of a shard by its number."""
    if request is None:
        return partial(NewShard, plan=plan, target=target, conversations=conversations)
    return partial(
        ExtendedShard,
        plan=plan,
        target=target,
        conversations=conversations,
        root=request.settings.out,
        first=request.manifest.parts[0],
    )


def _claims(
    job: Job, settings: CaptureSettings, plan: CapturePlan, paths: CachePaths
) -> Iterator[tuple[int, ShardWriter]]:
    """Shards for this worker, each claimed so that no other job captures it as well."""
    manifest = plan.manifest
    for shard in job.draw(settings.only or range(settings.shards)):
        committed = partial(is_committed, manifest, paths, shard)
        if not committed():
            try:
                yield shard, shard_writer(paths, manifest, plan.layout, shard, committed)
            except ClaimedError:
                continue


def _finish(
    settings: CaptureSettings,
    manifest: Manifest,
    paths: CachePaths,
    done: Step,
    rewritten: tuple[str, ...],
) -> CaptureReport:
    """Complete the cache if no shard is missing, and report.

    Raises:
        InputError: not one row could be captured.
        TooManySkippedError: more rows were skipped than allowed.
    """
    if missing := missing_shards(manifest, paths):
        return CaptureReport(
            settings.out, manifest, tuple(missing), done.shards, done.bytes, skipped=()
        )
    held = finish(manifest, paths)
    finished = held.manifest
    rewritten += held.rewritten
    if finished.counts.ok == 0:
        reasons = ", ".join(f"{n} x {r}" for r, n in finished.counts.skipped.items())
        raise InputError(
            f"--data {settings.data}: every row was skipped ({reasons}); mend them or the options, "
            "and give --overwrite"
        )
    if finished != manifest:
        write_manifest(settings.out, finished)
        rewritten += (manifest_path(settings.out).name,)
    kinds = held.skipped
    count = sum(kind.count for kind in kinds)
    if count > settings.rows.max_skipped * manifest.num_samples:
        raise TooManySkippedError(
            f"{count:,} of {manifest.num_samples:,} rows were skipped, more than --max-skipped "
            f"{settings.rows.max_skipped:g} allows; {settings.out} is complete without them: mend "
            "the rows and capture again, or give a larger --max-skipped to accept it\n"
            + skipped_table(kinds)
        )
    return CaptureReport(settings.out, finished, (), done.shards, done.bytes, kinds, rewritten)


def _finish_extension(
    request: ExtensionRequest, plan: CapturePlan, paths: CachePaths, done: Step
) -> CaptureReport:
    """Complete the extension if no shard is missing, and report."""
    missing = tuple(missing_shards(plan.manifest, paths))
    manifest = request.manifest if missing else finish_extension(request, plan)
    added = tuple(field.name for field in plan.manifest.fields)
    return CaptureReport(paths.root, manifest, missing, done.shards, done.bytes, (), added=added)


def _nothing_to_add(request: ExtensionRequest) -> CaptureReport:
    return CaptureReport(request.settings.out, request.manifest, (), 0, 0, (), added=())


capture = takes(CaptureOptions)(run_capture)
