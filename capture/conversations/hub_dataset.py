"""Datasets of the Hugging Face ``datasets`` library: saved to disk, or by hub id."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dspark.capture.conversations.records import COLUMNS, Record
from dspark.capture.conversations.spool import record_of
from dspark.capture.hub import offline_if_unreachable
from dspark.schemas.errors import InputError


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    )


class HubDataset:
    """One split of a dataset; its files are mapped by ``datasets``.

    Args:
        name: a folder that ``datasets`` saved, or an id on the hub.
        split: its name, or an empty string where there is only one.
        saved: whether ``name`` is a folder.

    Raises:
        InputError: ``datasets`` is not installed, or the dataset or split is not there.
    """

    def __init__(self, name: str, split: str, *, saved: bool) -> None:
        try:
            import datasets
        except ImportError:
            what = "a dataset saved by the library 'datasets'" if saved else "no such file"
            raise InputError(
                f"--data {name}: {what}; install 'pip install dspark[datasets]' to read datasets "
                "of Hugging Face"
            ) from None
        datasets.disable_progress_bars()
        try:
            with nullcontext() if saved else offline_if_unreachable():
                load = datasets.load_from_disk if saved else datasets.load_dataset
                loaded: Any = load(name)
        except Exception as error:  # the library, the network and loading code raise anything
            first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise InputError(
                f"--data {name}: the dataset cannot be loaded ({first_line})"
            ) from None
        if isinstance(loaded, dict):
            loaded = _split(name, split, loaded)
        elif split:
            raise InputError(f"--data {name}:{split}: the dataset has no splits; leave it out")
        # As Arrow, pictures stay as they are stored: a broken one costs its row only.
        self._dataset = loaded.with_format("arrow")
        self._wanted = [c for c in COLUMNS if c in loaded.column_names]
        self._rows = self._dataset.select_columns(self._wanted)

    def __len__(self) -> int:
        return len(self._dataset)

    def columns(self) -> list[str]:
        return list(self._dataset.column_names)

    def read(self, row: int) -> Record:
        return record_of(self._rows[row : row + 1], 0)

    def head(self, count: int) -> list[Record]:
        return [self.read(row) for row in range(min(count, len(self)))]

    def fingerprint(self) -> str:
        return str(self._dataset._fingerprint)


def _split(name: str, split: str, splits: dict[str, Any]) -> Any:
    if not split and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        given = f"{name}:{split}" if split else name
        raise InputError(
            f"--data {given}: name one of its splits, {', '.join(splits)}, e.g. --data "
            f"{name}:{next(iter(splits))}"
        )
    return splits[split]
