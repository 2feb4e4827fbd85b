"""Train a draft from a cache. The target itself is never opened."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from dspark.schemas.errors import InputError
from dspark.schemas.options import check_given
from dspark.schemas.torchrun import world_size
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.checkpoint import load_state, save_state, state_path
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.evaluate import draft_fields, evaluate
from dspark.train_from_cache.loop import make_optimizer, run
from dspark.train_from_cache.order import Order, training_order
from dspark.train_from_cache.outputs import MetricsLog, claim, evaluation, has_model, save_model
from dspark.train_from_cache.plan import Plan, check_numbers
from dspark.train_from_cache.progress import Progress
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.target_head import TargetHead

DEFAULT_EPOCHS = 10.0


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


def train_draft(
    cache: str | os.PathLike[str],
    arch: str,
    out: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int = 8,
    lr: float = 3e-4,
    warmup: float = 0.05,
    seed: int = 0,
    eval_fraction: float = 0.1,
    curriculum: bool = False,
    zero_hidden_states: bool = False,
    draft_config: Mapping[str, Any] | None = None,
    save_every: int = 500,
    log_every: int = 10,
    resume: bool = False,
    check_digests: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> TrainResult:
    """Train a draft and measure it, before and after, on held-out rows.

    On a CPU, equal arguments give equal weights, also through interruption and ``resume``.

    Args:
        cache: a finished cache.
        arch: name of the draft.
        out: folder for everything that comes out (see ``outputs.py``); ``drafts/ARCH`` by default.
        steps: updates to do.
        epochs: the same in passes over the training rows, rounded up; 10 if neither is given.
        batch_size: rows of an update.
        lr: peak learning rate, after which it falls along a cosine to a tenth.
        warmup: share of the steps in which the learning rate rises to it.
        seed: of weights, order and all other randomness, but not of the held-out rows.
        eval_fraction: share of rows held out, by a hash of the row number; 0 for none.
        curriculum: text-only rows first, rows with pictures later (MSD).
        zero_hidden_states: a control: the draft gets zeros for the target's hidden states, in
            training and in evaluation.
        draft_config: entries of the draft's config to set; text is read as the entry's type.
        save_every: steps between two saves of the training state.
        log_every: steps between two log records.
        resume: go on with the training in ``out``; does nothing if it is finished.
        check_digests: compare all that is read with its digest, and stop where it differs.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: show a progress bar, or lines, on stderr.

    Raises:
        InputError: an argument, the cache or ``out`` does not allow it, or the loss is not finite.
        StoppedError: SIGINT or SIGTERM, after the update under way was finished and saved.
    """
    if world_size() > 1:
        raise InputError(
            "training in several processes is not supported yet; run it without torchrun"
        )
    check_given(cache=cache, arch=arch, out=out, device=device)
    check_numbers(
        {
            "steps": steps,
            "batch_size": batch_size,
            "save_every": save_every,
            "log_every": log_every,
        },
        {"epochs": epochs, "lr": lr},
        {"warmup": warmup, "eval_fraction": eval_fraction},
        seed,
    )
    opened = open_cache(cache, check_digests=check_digests)
    cls = draft_class(arch)
    config = cls.config_from_cache(opened.manifest, dict(draft_config or {}))
    draft_fields(opened, cls, config)
    train_rows, eval_rows = split_rows(ok_rows(opened), eval_fraction)
    if not (opened.loss_tokens[train_rows] > 1).any():
        raise InputError(
            f"none of the {len(train_rows)} training rows of {opened.root} has two supervised "
            "tokens, so there is nothing to learn; capture conversations with longer answers"
        )
    # Numbers of numpy become Python's own, which JSON knows.
    plan = Plan(
        arch=arch,
        steps=int(steps or math.ceil((epochs or DEFAULT_EPOCHS) * len(train_rows) / batch_size)),
        batch_size=int(batch_size),
        lr=float(lr),
        warmup=float(warmup),
        seed=int(seed),
        eval_fraction=float(eval_fraction),
        curriculum=curriculum,
        zero_hidden_states=zero_hidden_states,
        save_every=int(save_every),
        log_every=int(log_every),
    )
    order = training_order(opened, train_rows, plan)
    folder = Path("drafts", arch) if out is None else Path(out)
    accelerator = _accelerator(device, folder)
    # What can fail comes before the folder is claimed.
    head = TargetHead.load(opened.root)
    draft = _new_draft(cls, config, head, plan.seed)
    with claim(folder, _settings(opened, config, plan, accelerator), resume):
        finished = evaluation(folder, "after") is not None and has_model(folder)
        if not finished:
            _train(
                accelerator, opened, draft, head, order, eval_rows.tolist(), plan, folder, progress
            )  # fmt: skip
        after = evaluation(folder, "after")
    assert after is not None
    return TrainResult(
        out=folder,
        arch=arch,
        steps=plan.steps,
        train_rows=len(train_rows),
        eval_rows=len(eval_rows),
        trainable_parameters=sum(p.numel() for p in draft.parameters() if p.requires_grad),
        before=evaluation(folder, "before"),
        after=after,
        already_finished=finished,
    )


def _train(
    accelerator: Accelerator,
    cache: Cache,
    draft: Draft,
    head: TargetHead,
    order: Order,
    eval_rows: Sequence[int],
    plan: Plan,
    out: Path,
    show: bool,
) -> None:
    """Do what is left of the training in ``out``, and leave its model and metrics there."""
    head.to(accelerator.device)
    optimizer = make_optimizer(draft)
    model, prepared = accelerator.prepare(draft, optimizer)
    state = state_path(out)
    start = load_state(state, draft, optimizer) if state.exists() else 0
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": start + 1}})
    fields = draft_fields(cache, type(draft), draft.config)
    batches = (order.rows_of_step(step) for step in range(start, plan.steps))

    with (
        closing(MetricsLog(out, start)) as log,
        closing(Progress(plan.arch, plan.steps, start, show)) as bar,
        BatchStream(
            cache,
            fields,
            batches,
            batch_size=plan.batch_size,
            device=accelerator.device,
        ) as stream,
    ):

        def record(entry: dict[str, Any]) -> None:
            log.write(entry)
            accelerator.log(_curves(entry), step=entry["step"])

        def save(step: int) -> None:
            log.sync()
            save_state(state, step, draft, optimizer)

        def measure(when: str, step: int) -> None:
            bar.say(f"{plan.arch}: measuring {len(eval_rows)} held-out rows {when} training")
            with accelerator.autocast():
                metrics = evaluate(
                    draft,
                    cache,
                    head,
                    eval_rows,
                    batch_size=plan.batch_size,
                    zero_hidden_states=plan.zero_hidden_states,
                )
            record({"event": "eval", "when": when, "step": step, **metrics})
            log.sync()
            bar.tau = metrics["tau"]

        if start == 0 and evaluation(out, "before") is None:
            measure("before", 0)
        run(
            accelerator, model, prepared, head, stream, start, plan, save=save, record=record,
            progress=bar,
        )  # fmt: skip
        save_model(draft, out)
        measure("after", plan.steps)
    accelerator.end_training()


def _accelerator(device: str, out: Path) -> Accelerator:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: choose from auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    cuda = device != "cpu" and torch.cuda.is_available()
    return Accelerator(
        cpu=device == "cpu",
        mixed_precision="bf16" if cuda else "no",
        log_with="tensorboard",
        project_dir=out,
    )


def _new_draft(cls: type[Draft], config: PreTrainedConfig, head: TargetHead, seed: int) -> Draft:
    """A draft with weights that depend on ``seed`` alone; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**64)
        draft = cls(config)
    draft.attach_head(head)
    return draft


def _settings(
    cache: Cache, config: PreTrainedConfig, plan: Plan, accelerator: Accelerator
) -> dict[str, dict[str, Any]]:
    """What ``training.json`` holds."""
    entries = json.loads(json.dumps(config.to_dict()))
    entries.pop("transformers_version", None)
    return {
        "options": plan.identity(),
        "draft_config": entries,
        "cache": {**cache.manifest.identity, "num_samples": len(cache)},
        "run": {
            "cache": str(cache.root),
            "device": str(accelerator.device),
            "mixed_precision": accelerator.mixed_precision,
            "versions": {p: version(p) for p in ("accelerate", "torch", "transformers")},
        },
    }


def _curves(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log record by curve, e.g. ``train/loss`` and ``eval/tau``."""
    group = "train" if entry["event"] == "step" else "eval"
    curves: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            curves |= {f"{group}/{name}/{k}": v for k, v in value.items()}
        elif isinstance(value, list):
            curves |= {f"{group}/{name}/{k}": v for k, v in enumerate(value) if v is not None}
        elif isinstance(value, int | float) and name != "step":
            curves[f"{group}/{name}"] = value
    return curves
