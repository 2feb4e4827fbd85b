"""Train drafts from a cache. The target itself is never opened."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dspark.schemas.errors import InputError
from dspark.schemas.fields import Field
from dspark.schemas.nested import refuse_inside_cache
from dspark.schemas.options import check_given, takes
from dspark.schemas.url import refuse_url
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.checkpoint import state_path
from dspark.train_from_cache.compiling import compiling
from dspark.train_from_cache.curves import plot_curves
from dspark.train_from_cache.decode import decoded
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.evaluate import Subject, draft_fields, evaluate_together, fields_of
from dspark.train_from_cache.init_from import WarmStart
from dspark.train_from_cache.loop import run
from dspark.train_from_cache.options import Location, TrainTask
from dspark.train_from_cache.order import Order, training_order
from dspark.train_from_cache.outputs import (
    check_track,
    claim,
    evaluation,
    has_model,
    save_model,
)
from dspark.train_from_cache.plan import Plan, check_numbers
from dspark.train_from_cache.progress import Progress
from dspark.train_from_cache.ranks import Ranks, gathered
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.trainee import Trainee


@dataclass(frozen=True)
class TrainResult:
    """What a training came to.

    Attributes:
        out: folder of the draft.
        arch: of the draft.
        steps: updates done in all.
        train_rows: rows trained on.
        eval_rows: rows held out.
        trainable_parameters: how many numbers were trained.
        before: metrics on the held-out rows before the first update (see ``metrics.py``).
        after: the same after the last one.
        already_finished: a resumed training had nothing left to do.
    """

    out: Path
    arch: str
    steps: int
    train_rows: int
    eval_rows: int
    trainable_parameters: int
    before: dict[str, Any] | None
    after: dict[str, Any]
    already_finished: bool


@takes(TrainTask)
def train_draft(task: TrainTask) -> TrainResult:
    """Train a draft and measure it, before and after, on held-out rows.

    The arguments are those of ``TrainTask``; ``options.py`` says what each means. On a CPU, equal
    arguments give equal weights, also through interruption and ``resume``. Started by torchrun, its
    processes train one draft together, each on its share of every step's rows.

    Raises:
        InputError: an argument, the cache or ``out`` does not allow it, or the loss is not finite.
        StoppedError: SIGINT or SIGTERM, after the update under way was finished and saved.
    """
    return _train([task])[0]


def train_drafts(
    cache: Location,
    archs: Sequence[str],
    out: Location = "drafts",
    *,
    draft_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[TrainResult]:
    """Train several drafts in one pass over the cache. Each comes out as from ``train_draft``.

    Args:
        cache: a finished cache.
        archs: names of the drafts.
        out: folder; the draft ``ARCH`` comes to ``out/ARCH``.
        draft_config: config entries; those named ``ARCH.entry`` are for that draft alone.
        options: as those of ``train_draft``.

    Raises:
        InputError: as ``train_draft``, or a draft is named twice, or not named but configured.
        StoppedError: as ``train_draft``.
    """
    refuse_url("--out", out, write=True)
    own: dict[str, dict[str, Any]] = {arch: {} for arch in archs}
    if not own or len(own) < len(archs):
        raise InputError(f"--arch {', '.join(archs)}: name each draft once")
    if options.get("init_from") is not None and len(own) > 1:
        raise InputError("--init-from starts one draft; train the others without it")
    for name, value in (draft_config or {}).items():
        arch, dot, entry = name.rpartition(".")
        if dot and arch not in own:
            raise InputError(f"-c {name}={value}: {arch} is not among the drafts to train")
        for entries in [own[arch]] if dot else own.values():
            entries[entry] = value
    tasks = [
        TrainTask(cache, arch, Path(out, arch), draft_config=entries, **options)
        for arch, entries in own.items()
    ]
    return _train(tasks)


@dataclass(frozen=True)
class _Job:
    """A draft to train, checked and built.

    Attributes:
        plan: its options.
        draft: with the weights that it starts from.
        out: its folder.
        facts: recorded with every evaluation.
    """

    plan: Plan
    draft: Draft
    out: Path
    facts: Mapping[str, float]


def _train(tasks: Sequence[TrainTask]) -> list[TrainResult]:
    """Train drafts whose tasks differ in draft, config and folder alone."""
    task = tasks[0]
    for given in tasks:
        check_given(cache=given.cache, arch=given.arch, out=given.out, init_from=given.init_from)
        refuse_url("--out", given.out, write=True)
        refuse_url("--init-from", given.init_from, write=False)
    check_numbers(task)
    check_track(task.track)
    for given in tasks:
        refuse_inside_cache("--out", _out(given), or_cache=True)
    cache = open_cache(
        task.cache,
        check_digests=task.check_digests,
        local_cache=task.local_cache,
        local_cache_size=task.local_cache_size,
    )
    train_rows, eval_rows = split_rows(ok_rows(cache), task.eval_fraction)
    if not train_rows.where(lambda some: cache.loss_tokens[some] > 1):
        raise InputError(
            f"none of the {len(train_rows)} training rows of {cache.location} has two supervised "
            "tokens, so there is nothing to learn; capture conversations with longer answers"
        )
    ranks = Ranks(task.device, task.fsdp)
    head = TargetHead.load(cache.root).to(ranks.device)
    # What can fail comes before the folders are claimed.
    jobs = [_job(task, cache, train_rows, head, ranks) for task in tasks]
    order = training_order(cache, train_rows, jobs[0].plan)
    # Do its buffers fit into memory?
    fields = fields_of(cache, [job.draft for job in jobs])
    _stream(fields, cache, jobs[0].plan, ranks, [], torch.device("cpu"))
    with ExitStack() as claimed:
        if ranks.is_first:
            for job in jobs:
                settings = _settings(cache, job, ranks)
                claimed.enter_context(claim(job.out, settings, task.resume))
        ranks.wait_for_first()
        finished = [evaluation(j.out, "after") is not None and has_model(j.out) for j in jobs]
        left = [job for job, done in zip(jobs, finished, strict=True) if not done]
        if left:
            with compiling(task.compile):
                _train_jobs(left, cache, head, order, eval_rows, ranks, task)
    return [
        TrainResult(
            out=job.out,
            arch=job.plan.arch,
            steps=job.plan.steps,
            train_rows=len(train_rows),
            eval_rows=len(eval_rows),
            trainable_parameters=_trainable(job.draft),
            before=evaluation(job.out, "before"),
            after=evaluation(job.out, "after") or {},
            already_finished=done,
        )
        for job, done in zip(jobs, finished, strict=True)
    ]


def _job(
    task: TrainTask, cache: Cache, train_rows: Sequence[int], head: TargetHead, ranks: Ranks
) -> _Job:
    cls = draft_class(task.arch)
    overrides = dict(task.draft_config or {})
    warm = None
    if task.init_from is not None:
        warm = WarmStart(Path(task.init_from), cls, cache.manifest, overrides)
    config = warm.config if warm else cls.config_from_cache(cache.manifest, overrides)
    draft_fields(cache, cls, config)
    plan = Plan.of(task, len(train_rows))
    draft = _new_draft(cls, config, head, plan.seed)
    facts: dict[str, float] = {}
    if warm:
        warm.load_into(draft)
    else:
        facts = draft.start(cache, train_rows, head)
    return _Job(plan, draft, _out(task), facts)


def _out(task: TrainTask) -> Path:
    return Path("drafts", task.arch) if task.out is None else Path(task.out)


def _train_jobs(
    jobs: Sequence[_Job],
    cache: Cache,
    head: TargetHead,
    order: Order,
    eval_rows: Sequence[int],
    ranks: Ranks,
    task: TrainTask,
) -> None:
    """Do what is left of some trainings, and leave their models and metrics in their folders."""
    plan = jobs[0].plan
    fresh = [j for j in jobs if not state_path(j.out).exists() and not evaluation(j.out, "before")]
    ranks.wait_for_first()  # to open what it now writes to
    with ExitStack() as opened:
        trainees = [
            opened.enter_context(closing(Trainee(ranks, job.draft, job.plan, job.out, task.track)))
            for job in jobs
        ]
        start = min(trainee.start for trainee in trainees)
        label, shown = "+".join(job.plan.arch for job in jobs), task.progress and ranks.is_first
        bar = opened.enter_context(closing(Progress(label, plan.steps, start, shown)))

        def measure(some: Sequence[tuple[_Job, Trainee]], when: str, step: int) -> None:
            bar.say(f"{label}: measuring {len(eval_rows)} held-out rows {when} training")
            subjects = [Subject(job.draft, plan.zero_hidden_states) for job, _ in some]
            with ExitStack() as whole, ranks.accelerator.autocast():
                for job, _ in some:
                    whole.enter_context(gathered(job.draft))
                found = evaluate_together(
                    subjects, cache, head, eval_rows, batch_size=plan.batch_size, ranks=ranks
                )
            for (job, trainee), metrics in zip(some, found, strict=True):
                entry = {"event": "eval", "when": when, "step": step, **metrics, **job.facts}
                trainee.record(entry)
                trainee.sync()
                bar.tau[job.plan.arch] = metrics["tau"]

        pairs = list(zip(jobs, trainees, strict=True))
        if fresh:
            measure([pair for pair in pairs if pair[0] in fresh], "before", 0)
        fields = fields_of(cache, [job.draft for job in jobs])
        steps = map(order.rows_of_step, range(start, plan.steps))
        # A process without rows of its own reads one, which will not count.
        own = (ranks.share(rows) or rows[:1] for rows in steps)
        with (
            cache.ahead(own, fields) as coming,
            _stream(fields, cache, plan, ranks, coming, ranks.device) as stream,
        ):
            batches = decoded(stream, fields, head.embeddings)
            run(ranks, trainees, head, batches, plan, bar)
        for job, trainee in pairs:
            if trainee.ema:
                trainee.ema.become_weights()
            save_model(job.draft, job.out, write=ranks.is_first)
        measure(pairs, "after", plan.steps)
        if ranks.is_first:
            for job in jobs:
                bar.say(plot_curves(job.out))
        ranks.wait_for_first()  # to have recorded what the others will read


def _stream(
    fields: Sequence[Field],
    cache: Cache,
    plan: Plan,
    ranks: Ranks,
    batches: Iterable[Sequence[int]],
    device: torch.device,
) -> BatchStream:
    """Reads what this process has of each batch."""
    return BatchStream(
        cache,
        fields,
        batches,
        batch_size=max(1, -(-plan.batch_size // ranks.size)),
        trim=plan.trim,
        device=device,
    )


def _new_draft(cls: type[Draft], config: PreTrainedConfig, head: TargetHead, seed: int) -> Draft:
    """A draft where ``head`` is, with weights that depend on ``seed`` alone; torch's generator is
    left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**64)
        draft = cls(config)
    # On its device the draft need not have a head of its own.
    draft.to(head.weight.device)
    draft.attach_head(head)
    return draft


def _trainable(draft: Draft) -> int:
    return sum(p.numel() for p in draft.parameters() if p.requires_grad)


def _settings(cache: Cache, job: _Job, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """What ``training.json`` holds."""
    entries = json.loads(json.dumps(job.draft.config.to_dict()))
    entries.pop("transformers_version", None)
    return {
        "options": job.plan.identity(),
        "draft_config": entries,
        "cache": {**cache.manifest.identity, "num_samples": len(cache)},
        "run": {
            "cache": cache.location,
            "device": str(ranks.device),
            "processes": ranks.size,
            "mixed_precision": ranks.accelerator.mixed_precision,
            "versions": {p: version(p) for p in ("accelerate", "torch", "transformers")},
        },
    }
