"""The folder of a training.

training.json                    what is trained, written first of all
metrics.jsonl                    one JSON object per line; see ``MetricsLog``
tensorboard/                     the same numbers as curves
training_state/                  what --resume goes on from
model.safetensors, config.json   the trained draft, written at the end
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dspark.schemas.durable import fsync_dir, write_file
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import identity_differences
from dspark.train_from_cache.checkpoint import make_durable, state_path

_SETTINGS = "training.json"
_METRICS = "metrics.jsonl"
_MODEL = ("model.safetensors", "config.json")


def begin(out: Path, settings: dict[str, dict[str, Any]], resume: bool) -> None:
    """Claim a folder for a new training, or check that the one in it can go on.

    Args:
        out: the folder.
        settings: groups of JSON values. All but those of group ``run`` must stay the same.
        resume: go on with the training in ``out``.

    Raises:
        InputError: there is a training and ``resume`` is false, or none and it is true, or it has
            other settings.
    """
    path = out / _SETTINGS
    if not resume:
        held = [n for n in (_SETTINGS, _METRICS, *_MODEL) if (out / n).exists()]
        if held:
            raise InputError(
                f"{out} already holds a training ({held[0]}); continue it with --resume, or choose "
                "another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(settings, indent=2) + "\n").encode())
        return
    try:
        old = json.loads(path.read_bytes())
        differences = identity_differences(_flat(old), _flat(settings))
    except FileNotFoundError:
        raise InputError(
            f"--resume: {out} holds no training (no {_SETTINGS}); leave --resume out to start one"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not readable ({error}); choose another --out") from None
    if differences:
        raise InputError(
            f"--resume continues the training in {out} with the settings it was started with, but "
            f"these differ: {'; '.join(differences)}; give the same ones, or choose another --out"
        )


def _flat(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One entry per setting that a resumed training must share, named as a user knows it."""
    flat = {"--" + k.replace("_", "-"): v for k, v in settings["options"].items()}
    for group in ("draft_config", "cache"):
        flat |= {f"{group}.{k}": v for k, v in settings[group].items()}
    return flat


class MetricsLog:
    """``metrics.jsonl``: ``{"event": "step", "step": updates done, …}`` and
    ``{"event": "eval", "when": "before" | "after", …}``, one per line. None stands for a number
    that could not be measured.
    """

    def __init__(self, out: Path, step: int) -> None:
        """Open the log of a training that goes on after ``step`` updates, without later records."""
        path = out / _METRICS
        kept = [r for r in read_metrics(out) if r["step"] <= step and r.get("when") != "after"]
        write_file(path, "".join(_line(record) for record in kept).encode())
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        self._file.write(_line(record))
        self._file.flush()

    def sync(self) -> None:
        """Make all records so far durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The records of a training so far; a line that a crash cut off is left out."""
    try:
        lines = (out / _METRICS).read_text().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def evaluation(out: Path, when: str) -> dict[str, Any] | None:
    """The metrics recorded ``before`` or ``after`` the training, or None."""
    for record in read_metrics(out):
        if record["event"] == "eval" and record["when"] == when:
            return {k: v for k, v in record.items() if k not in ("event", "when", "step")}
    return None


def save_model(model: PreTrainedModel, out: Path) -> None:
    """Publish config and weights in ``out``."""
    beside = state_path(out).parent / "model.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(beside)
    if bars:
        transformers_logging.enable_progress_bar()
    for file in sorted(beside.iterdir(), reverse=True):
        make_durable(file)
        os.replace(file, out / file.name)
    beside.rmdir()
    fsync_dir(out)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
