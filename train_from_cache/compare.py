"""Several drafts measured side by side on the same held-out rows, for ``dspark evaluate``."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.schemas.errors import InputError, one_line
from dspark.schemas.url import refuse_url
from dspark.train_from_cache.cache import Cache, ok_rows, open_cache
from dspark.train_from_cache.drafts import architectures, draft_class
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.evaluate import Subject, draft_fields, evaluate_together
from dspark.train_from_cache.init_from import WarmStart
from dspark.train_from_cache.outputs import read_settings
from dspark.train_from_cache.split import held_out
from dspark.train_from_cache.target_head import TargetHead

DEFAULT_FRACTION = 0.1


def evaluate_drafts(
    cache: str | os.PathLike[str],
    drafts: Sequence[str | os.PathLike[str]],
    *,
    rows: int | None = None,
    all_rows: bool = False,
    eval_fraction: float | None = None,
    batch_size: int = 8,
    zero_hidden_states: bool = False,
    device: str = "auto",
    local_cache: str | os.PathLike[str] | None = None,
    local_cache_size: str | None = None,
) -> dict[str, Any]:
    """Measure drafts on the rows that their trainings held out, reading each row once for all.

    Args:
        cache: a finished cache of the drafts' target: its directory or URL.
        drafts: folders in the format that servers load: trained here or published.
        rows: at most so many of the rows, spread evenly.
        all_rows: all rows of the cache, those that drafts were trained on too.
        eval_fraction: share of rows that is held out, by a hash of the row number; by default the
            trainings', and 0.1 for drafts that do not say.
        batch_size: rows read at a time.
        zero_hidden_states: give zeros for the target's hidden states, as drafts trained on zeros
            are always given.
        device: ``auto``, ``cpu`` or ``cuda``.
        local_cache: see ``open_cache``.
        local_cache_size: see ``open_cache``.

    Returns:
        JSON values: ``cache``, ``rows``, ``eval_fraction`` (None with ``all_rows``), and
        ``drafts``, in the order given, each with ``draft`` (its folder), ``arch``,
        ``rows_trained_on`` (how many of the rows its training used, None if that is not known),
        ``zero_hidden_states``, the metrics of ``metrics.py`` and ``calibration``
        (``calibration.py``).

    Raises:
        InputError: a draft cannot be loaded, was made for another target or reads a field that the
            cache lacks, or no rows were held out for all of them.
    """
    if not drafts:
        raise InputError("--draft: name at least one folder with a draft")
    for name, number in (("--rows", rows), ("--batch-size", batch_size)):
        if number is not None and number < 1:
            raise InputError(f"{name} {number}: must be at least 1")
    for draft in drafts:
        refuse_url("--draft", draft, write=False)
    folders = [Path(draft) for draft in drafts]
    where = _device(device)
    opened = open_cache(cache, local_cache=local_cache, local_cache_size=local_cache_size)
    head = TargetHead.load(opened.root)
    loaded = [_load(folder, opened, head) for folder in folders]
    trainings = [_training(folder) for folder in folders]
    fraction = None
    if not all_rows:
        fraction = _fraction(folders, trainings, eval_fraction)
    elif eval_fraction is not None:
        raise InputError("--all-rows and --eval-fraction both say which rows; give one of them")
    chosen = _rows(opened, fraction, rows)
    subjects = [
        Subject(
            draft.to(where),
            zero_hidden_states or (training is not None and training.zero_hidden_states),
            calibrate=True,
        )
        for draft, training in zip(loaded, trainings, strict=True)
    ]
    # The precision of training, so that its last evaluation gives the same numbers.
    with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
        results = evaluate_together(subjects, opened, head.to(where), chosen, batch_size=batch_size)
    return {
        "cache": opened.location,
        "rows": len(chosen),
        "eval_fraction": fraction,
        "drafts": [
            {
                "draft": str(folder),
                "arch": subject.draft.arch,
                "rows_trained_on": None if training is None else training.used(opened, chosen),
                "zero_hidden_states": subject.zero_hidden_states,
                **result,
            }
            for folder, subject, training, result in zip(
                folders, subjects, trainings, results, strict=True
            )
        ],
    }


@dataclass(frozen=True)
class _Training:
    """What ``training.json`` says about the rows that a draft was trained on.

    Attributes:
        eval_fraction: share of them held out.
        zero_hidden_states: whether it got zeros for the target's hidden states.
        num_samples: rows of the dataset, skipped ones included.
        data: fingerprint of the dataset, if it has one.
    """

    eval_fraction: float
    zero_hidden_states: bool
    num_samples: int
    data: str | None

    def used(self, cache: Cache, rows: Sequence[int]) -> int:
        """How many of a cache's rows it was trained on."""
        if self.data != cache.manifest.identity.get("data"):
            return 0
        some = np.asarray(rows)
        return int((~held_out(some, self.eval_fraction) & (some < self.num_samples)).sum())


def _training(folder: Path) -> _Training | None:
    """Of a draft that was trained here."""
    settings = read_settings(folder)
    if settings is None:
        return None
    try:
        options, cache = settings["options"], settings["cache"]
        return _Training(
            float(options["eval_fraction"]),
            bool(options["zero_hidden_states"]),
            int(cache["num_samples"]),
            cache.get("data"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder}/training.json: not readable ({one_line(repr(error))}); it says which rows "
            "the draft was trained on, so take it away only if that is of no interest"
        ) from None


def _fraction(
    folders: Sequence[Path], trainings: Sequence[_Training | None], given: float | None
) -> float:
    """The share of rows to measure on: ``given``, or what all trainings held out."""
    if given is not None:
        if not 0 < given < 1:
            raise InputError(f"--eval-fraction {given}: choose from above 0 to below 1")
        return given
    known = {
        str(folder): training.eval_fraction
        for folder, training in zip(folders, trainings, strict=True)
        if training is not None
    }
    fractions = set(known.values()) or {DEFAULT_FRACTION}
    if len(fractions) > 1:
        said = ", ".join(f"{folder} {fraction:g}" for folder, fraction in known.items())
        raise InputError(
            f"the drafts were trained with different --eval-fraction ({said}), so that rows held "
            "out for one were trained on by another; give --eval-fraction: what the smallest "
            "holds out, the others hold out too"
        )
    (fraction,) = fractions
    if not fraction:
        raise InputError(
            f"{next(iter(known))} was trained with --eval-fraction 0, on all rows: to measure it "
            "on rows that it has seen, give --eval-fraction or --all-rows"
        )
    return fraction


def _rows(cache: Cache, fraction: float | None, limit: int | None) -> Sequence[int]:
    """The dataset rows to measure on."""
    rows = ok_rows(cache)
    if fraction is not None:
        count = len(rows)
        rows = rows.where(lambda some: held_out(some, fraction))
        if not rows:
            raise InputError(
                f"--eval-fraction {fraction:g} holds out none of the {count} samples of "
                f"{cache.location}; raise it, or give --all-rows"
            )
    if limit is not None and limit < len(rows):
        return [rows[i] for i in np.linspace(0, len(rows) - 1, limit).round().astype(np.int64)]
    return rows


def _load(folder: Path, cache: Cache, head: TargetHead) -> Draft:
    """The draft in a folder, with the target's embeddings and head."""
    cls = _class_of(folder)
    stored = WarmStart(folder, cls, cache.manifest, {}, option="--draft")
    draft_fields(cache, cls, stored.config)
    with torch.random.fork_rng(devices=[]):
        draft = cls(stored.config)
    draft.attach_head(head)
    stored.load_into(draft)
    return draft


def _class_of(folder: Path) -> type[Draft]:
    """The draft that writes the architecture of ``config.json``."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes()).get("architectures") or []
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"--draft {folder}: there is no config.json, so this is no draft (a training writes it "
            "at its end)"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not readable ({one_line(str(error))})") from None
    served: dict[str, type[Draft]] = {}
    for cls in map(draft_class, architectures()):
        served |= dict.fromkeys(cls.config_class().to_dict()["architectures"], cls)
    for name in found:
        if name in served:
            return served[name]
    raise InputError(
        f"{path}: architectures is {found}, which is none of the drafts known here: "
        + ", ".join(served)
    )


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {name}: choose from auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
