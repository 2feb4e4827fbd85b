"""Where a training starts from: a draft in the format that servers load, published or trained here.

Its config is taken as it is, its tensors go where their names say. Nothing is guessed, skipped or
left at random: a name, a shape or a type that does not fit is an error. Only copies of the target's
embeddings and head, which some checkpoints have, are passed over: the draft gets those of the
cache's target.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from dspark.schemas.errors import InputError, one_line
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.draft_parts.target_dims import target_dims
from dspark.train_from_cache.drafts.base import Draft

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_TARGET = {"embed_tokens.weight", "lm_head.weight"}
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL",)}
_OF_BAD_INPUT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
_MOST_LISTED = 12


class WarmStart:
    """A draft to start from, checked against the cache's target.

    Attributes:
        config: its own, with the user's entries in.
    """

    config: PreTrainedConfig

    def __init__(
        self,
        folder: Path,
        cls: type[Draft],
        manifest: Manifest,
        overrides: dict[str, Any],
        *,
        option: str = "--init-from",
    ) -> None:
        """
        Args:
            folder: with ``config.json`` and ``model.safetensors``, or shards of it and their index.
            cls: the draft to train.
            manifest: of the cache.
            overrides: config entries that the user set; those that other tensors would follow from
                are refused.
            option: that named the folder, for messages.

        Raises:
            InputError: the folder does not hold a draft of that class for that target.
        """
        self._where = f"{option} {folder}"
        self._tensors: dict[str, tuple[Path, str]] = {}
        self._headers: dict[str, tuple[list[int], str]] = {}
        entries = self._read_config(folder, cls)
        self._read_headers(folder, cls)
        with self._unusable(folder / _CONFIG):
            if hasattr(cls.config_class, "num_target_layers"):
                entries.setdefault("num_target_layers", manifest.target.num_layers)
            config = cls.config_class.from_dict(entries)
        self._check_target(config, manifest)
        known = {
            name: getattr(config, name)
            for name in ("mask_token_id", "target_layer_ids")
            if getattr(config, name, None) is not None
        }
        fresh = cls.config_from_cache(manifest, {**known, **overrides})
        for name, value in vars(config).items():
            if value is None:
                setattr(config, name, getattr(fresh, name, None))
        before = self._build(cls, config)
        if misfits := self._misfits(before, set()):
            raise InputError(f"{self._where}: not the tensors of this draft: {misfits}")

        for name in overrides:
            if name in target_dims(manifest) or not hasattr(fresh, name):
                raise InputError(f"-c {name}: {self._where} decides it; leave one of the two out")
            setattr(config, name, getattr(fresh, name))
        after = self._build(cls, config)
        added = {name for name in after.keys() - before if name.split(".")[0] in cls.added}
        if misfits := self._misfits(after, added):
            changed = ", ".join(f"-c {name}={overrides[name]}" for name in overrides)
            raise InputError(
                f"{changed}: that is another network than the one in {folder} ({misfits}); leave "
                "out --init-from, or what changes the network"
            )
        self.config = config

    def load_into(self, draft: Draft) -> None:
        """Put the tensors into a draft that was built from ``config``.

        Raises:
            InputError: a file is damaged.
        """
        own = _own_tensors(draft)
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for name, (path, stored) in self._tensors.items():
            if name in own:
                by_file.setdefault(path, []).append((name, stored))
        for path, names in by_file.items():
            with self._unusable(path), safe_open(path, framework="pt") as file, torch.no_grad():
                for name, stored in names:
                    own[name].copy_(file.get_tensor(stored))

    def _read_config(self, folder: Path, cls: type[Draft]) -> dict[str, Any]:
        path = folder / _CONFIG
        with self._unusable(path):
            entries = dict(json.loads(path.read_bytes()))
        found = entries.get("architectures")
        served = cls.config_class().to_dict()["architectures"]
        if not isinstance(found, list) or not set(map(str, found)) & set(served):
            raise InputError(
                f"{path}: architectures is {found}, and --arch {cls.arch} starts from "
                f"{' or '.join(served)}"
            )
        entries.pop("auto_map", None)  # names code that is not copied along
        return entries

    def _read_headers(self, folder: Path, cls: type[Draft]) -> None:
        for path in self._weight_files(folder):
            with self._unusable(path), safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118
                    name = stored
                    for theirs, ours in cls.aliases.items():
                        if stored.startswith(theirs):
                            name = ours + stored.removeprefix(theirs)
                    if name in self._tensors:
                        raise InputError(f"{path}: holds {name} a second time, as {stored}")
                    view = file.get_slice(stored)
                    self._tensors[name] = path, stored
                    self._headers[name] = view.get_shape(), view.get_dtype()

    def _weight_files(self, folder: Path) -> list[Path]:
        if (folder / _WEIGHTS).exists():
            return [folder / _WEIGHTS]
        index = folder / _INDEX
        if index.exists():
            with self._unusable(index):
                files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                if any(Path(file).name != file for file in files):
                    raise ValueError("it names files of other folders")
                return [folder / file for file in files]
        pickles = sorted(p.name for end in ("bin", "pt", "pth") for p in folder.glob(f"*.{end}"))
        if pickles:
            raise InputError(
                f"{self._where}: its weights are pickled ({pickles[0]}), which can run code when "
                f"opened and is never read here; convert them to {_WEIGHTS}"
            )
        raise InputError(f"{self._where}: there is no {_WEIGHTS}, nor {_INDEX}")

    def _check_target(self, config: PreTrainedConfig, manifest: Manifest) -> None:
        target = manifest.target
        width = "target_hidden_size" if hasattr(config, "target_hidden_size") else "hidden_size"
        wanted = {width: target.hidden_size, "vocab_size": target.vocab_size}
        if hasattr(config, "num_target_layers"):
            wanted["num_target_layers"] = target.num_layers
        for name, want in wanted.items():
            if getattr(config, name) != want:
                raise InputError(
                    f"{self._where}: the draft was made for another target: its {name} is "
                    f"{getattr(config, name)}, the cache's {want}"
                )

    def _build(self, cls: type[Draft], config: PreTrainedConfig) -> dict[str, Tensor]:
        """The tensors of a draft of this config, without memory."""
        with self._unusable(Path(_CONFIG)), torch.device("meta"):
            return _own_tensors(cls(config))

    def _misfits(self, own: Mapping[str, Tensor], added: set[str]) -> str:
        """What the checkpoint and a draft with tensors ``own`` do not share, but for ``added``;
        empty if they fit."""
        found = self._headers
        phrases = [f"unknown {name}" for name in found.keys() - own - _OF_TARGET]
        phrases += [f"missing {name}" for name in own.keys() - found - added]
        for name in own.keys() & found:
            shape, dtype = found[name]
            if list(own[name].shape) != shape:
                phrases.append(f"{name} is {shape} and not {list(own[name].shape)}")
            elif dtype not in _DTYPES.get(own[name].dtype, _FLOATS):
                phrases.append(f"{name} is of type {dtype}")
        phrases.sort()
        more = len(phrases) - _MOST_LISTED
        return "; ".join(phrases[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else []))

    @contextmanager
    def _unusable(self, path: Path) -> Iterator[None]:
        """Whatever a stranger's file makes a library raise is one sentence."""
        try:
            yield
        except InputError:
            raise
        except FileNotFoundError:
            raise InputError(f"{self._where}: there is no {path.name}") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not readable ({one_line(str(error))})") from None
        except _OF_BAD_INPUT as error:
            said = one_line(f"{type(error).__name__}: {error}")
            raise InputError(f"{self._where}: {path.name} is not usable ({said})") from None


def _own_tensors(draft: Draft) -> dict[str, Tensor]:
    """What a checkpoint gives a draft: all that it saves but the copies of the target's."""
    frozen = tuple(f"{name}." for name in draft.frozen)
    return {k: v for k, v in draft.state_dict().items() if not k.startswith(frozen)}
