"""The folder of a training.

training.json                    what is trained, written first of all
metrics.jsonl                    one JSON object per line; see ``MetricsLog``
tensorboard/                     the same numbers as curves
training_state/                  what --resume goes on from
model.safetensors, config.json   the trained draft, written at the end
curves.png                       loss and acceptance, if matplotlib is there
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from accelerate.utils import is_wandb_available
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dspark.schemas.disk_errors import os_errors
from dspark.schemas.durable import fsync_dir, write_file
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import identity_differences
from dspark.train_from_cache.checkpoint import make_durable, state_path
from dspark.train_from_cache.ranks import whole

_SETTINGS = "training.json"
_METRICS = "metrics.jsonl"
_MODEL = ("model.safetensors", "config.json")


@contextmanager
def claim(out: Path, settings: dict[str, dict[str, Any]], resume: bool) -> Iterator[None]:
    """Have a folder for a new training, or for going on with the one in it, to oneself.

    Args:
        out: the folder.
        settings: groups of JSON values. All but those of group ``run`` must stay the same.
        resume: go on with the training in ``out``.

    Raises:
        InputError: there is a training and ``resume`` is false, or none and it is true, or it has
            other settings, or another process is at work on it.
    """
    if not resume:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(
                f"--out {out}: a file lies where this folder would; choose another"
            ) from None
    with _lock(out):
        if resume:
            _check_settings(out, settings)
        else:
            held = [n for n in (_SETTINGS, _METRICS, *_MODEL) if (out / n).exists()]
            if held:
                raise InputError(
                    f"{out} already holds a training ({held[0]}); continue it with --resume, or "
                    "choose another --out"
                )
            write_file(out / _SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())
        yield


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Keep other processes out of a folder, where there is one and the file system can lock."""
    try:
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{out}: another process is training here; wait for it, or choose another --out"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(fd)


def _check_settings(out: Path, settings: dict[str, dict[str, Any]]) -> None:
    """Check that the training in ``out`` has these settings.

    Raises:
        InputError: it has others, or there is none.
    """
    path = out / _SETTINGS
    try:
        old = json.loads(path.read_bytes())
        differences = identity_differences(_flat(old), _flat(settings))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"--resume: {out} holds no training (no {_SETTINGS}); leave --resume out to start one"
        ) from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not readable ({error}); choose another --out") from None
    if differences:
        raise InputError(
            f"--resume continues the training in {out} with the settings it was started with, but "
            f"these differ: {'; '.join(differences)}; give the same ones, or choose another --out"
        )


def read_settings(out: Path) -> dict[str, Any] | None:
    """What ``training.json`` holds, or None where there is none.

    Raises:
        InputError: it is not readable.
    """
    path = out / _SETTINGS
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable ({error})") from None
    return settings


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


class Journal:
    """What is recorded of a training: its metrics log, and the same numbers as curves."""

    def __init__(self, out: Path, step: int, track: str | None) -> None:
        """Open the records of a training that goes on after ``step`` updates.

        Args:
            out: its folder.
            step: updates done.
            track: ``wandb`` to send the curves to Weights & Biases, too.
        """
        self._log = MetricsLog(out, step)
        self._trackers: list[GeneralTracker] = [
            TensorBoardTracker("tensorboard", out, purge_step=step + 1)
        ]
        if track:
            settings = {"name": str(out), "dir": str(out), "reinit": "create_new"}
            self._trackers.append(WandBTracker("dspark", **settings))
        for tracker in self._trackers:
            tracker.start()

    def record(self, entry: dict[str, Any]) -> None:
        """Append a record of ``MetricsLog``."""
        self._log.write(entry)
        curves = _curves(entry, "train" if entry["event"] == "step" else "eval")
        for tracker in self._trackers:
            tracker.log(curves, step=entry["step"])

    def sync(self) -> None:
        """Make all records so far durable."""
        self._log.sync()

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        for tracker in self._trackers:
            tracker.finish()


def check_track(track: str | None) -> None:
    """Check that the curves can go to the place that ``--track`` names.

    Raises:
        InputError: they cannot.
    """
    if track not in (None, "wandb"):
        raise InputError(f"--track {track}: choose wandb, or leave it out")
    if track and not is_wandb_available():
        raise InputError("--track wandb: wandb is not installed; pip install wandb")


def _curves(value: Any, name: str) -> dict[str, float]:
    """The numbers in a log record by curve, e.g. ``train/loss`` and ``eval/acceptance/0``."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        curves: dict[str, float] = {}
        for key, part in value.items():
            if key != "step":
                curves |= _curves(part, f"{name}/{key}")
        return curves
    return {name: value} if isinstance(value, int | float) else {}


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The records of a training so far, up to a line that is none: a crash cut it off."""
    try:
        lines = (out / _METRICS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
            record["step"], record["event"]  # noqa: B018
        except (ValueError, TypeError, KeyError):
            break
        records.append(record)
    return records


def evaluation(out: Path, when: str) -> dict[str, Any] | None:
    """The metrics recorded ``before`` or ``after`` the training, or None."""
    for record in read_metrics(out):
        if record["event"] == "eval" and record["when"] == when:
            return {k: v for k, v in record.items() if k not in ("event", "when", "step")}
    return None


def has_model(out: Path) -> bool:
    """Whether a trained draft is in ``out``."""
    return all((out / name).is_file() for name in _MODEL)


def save_model(model: PreTrainedModel, out: Path, *, write: bool = True) -> None:
    """Publish config and weights in ``out``.

    All processes call it, one of them with ``write``.
    """
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if not write:
        return
    beside = state_path(out).parent / "model.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    with os_errors(beside):
        model.save_pretrained(beside, state_dict=weights)
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
