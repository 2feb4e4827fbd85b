"""Rows of a cache captured once more, each in the batch that it was captured in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import transformers
from torch import Tensor

from dspark.capture.batch import run_batch, split_batch
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations, open_conversations
from dspark.capture.new_shard import NON_FINITE
from dspark.capture.options import CaptureOptions
from dspark.capture.plan import target_identity
from dspark.capture.recorded import recorded_options
from dspark.capture.rendering.batch_inputs import batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.settings import CaptureSettings, RowOptions
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Manifest, identity_differences
from dspark.schemas.options import check_given
from dspark.schemas.parts import readable_parts
from dspark.schemas.paths import CachePaths


@dataclass(frozen=True)
class Recapture:
    """A target and the conversations of a cache, ready to capture rows of it again.

    Attributes:
        target_differences: what the target is not that was captured, one phrase each.
        other_differences: what else is not as it was and changes how floats are rounded.
    """

    target_differences: list[str]
    other_differences: list[str]
    _paths: CachePaths
    _manifest: Manifest
    _target: Target
    _conversations: Conversations
    _options: RowOptions

    def rows(self, samples: Iterable[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Capture rows again: dataset row, and what would be stored of it, ``[L, …]`` per field.

        Nothing comes where the target is built otherwise than the captured one.

        Args:
            samples: dataset rows that the cache holds.

        Raises:
            InputError: a row cannot be captured any more.
            IncompatibleCacheError: the index of a shard is damaged.
        """
        if self._target.num_layers != self._manifest.target.num_layers:
            return
        rows_per_shard = self._manifest.rows_per_shard
        for shard, some in groupby(sorted(samples), lambda sample: sample // rows_per_shard):
            wanted = set(some)
            for batch in self._batches(shard):
                if wanted.isdisjoint(batch):
                    continue
                rows = [self._encode(sample) for sample in batch]
                for sample, tensors in self._run(rows):
                    if sample in wanted:
                        yield sample, tensors

    def _batches(self, shard: int) -> list[list[int]]:
        """The dataset rows of each batch of a shard, as they were captured."""
        table, _ = read_index(self._paths, self._manifest, shard)
        columns = ("sample", "status", "reason", "length")
        lengths: dict[int, int] = {}
        for sample, status, reason, length in zip(
            *(table[name].to_pylist() for name in columns), strict=True
        ):
            if status == OK:
                lengths[sample] = length
            elif reason == NON_FINITE:  # found in its batch, among the others
                lengths[sample] = len(self._encode(sample))
        samples = list(lengths)
        batches = plan_batches(list(lengths.values()), self._manifest.identity["batch_tokens"])
        return [[samples[i] for i in batch] for batch in batches]

    def _encode(self, sample: int) -> EncodedRow:
        manifest = self._manifest
        row = encode_row(
            sample, self._conversations, self._target, manifest.max_length, self._options
        )
        if isinstance(row, EncodedRow):
            return row
        raise InputError(
            f"--data {self._conversations.path}: {self._conversations.where(sample)} was captured "
            f"and cannot be captured any more ({row.reason}); give the --against and --data of the "
            "capture"
        )

    def _run(self, rows: list[EncodedRow]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        fake_image = self._manifest.identity["fake_image"]
        for inputs in batch_inputs(rows, self._conversations, self._target, fake_image=fake_image):
            features = run_batch(
                inputs,
                replace(self._manifest, layers=self._manifest.all_layers),
                self._target,
                with_head=self._manifest.best_logits != "head",
            )
            readable = (part for _, part in readable_parts(self._paths.root, self._manifest))
            split = (split_batch(inputs, features, part) for part in readable)
            for of_row in zip(*split, strict=True):
                tensors = {k: v for _, some in of_row for k, v in some.items()}
                yield of_row[0][0].sample, tensors


def prepare_recapture(
    root: Path,
    manifest: Manifest,
    *,
    target: str,
    data: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Recapture:
    """Load a target and open the conversations to compare a cache with.

    Args:
        root: the cache.
        manifest: of the cache; its identity has the other options of the capture.
        target: folder or Hugging Face id.
        data: where the conversations are now; by default, where they were.
        chat_template: file with the chat template that the capture was given, if it was.
        trust_remote_code: run code that the target brings along.

    Raises:
        InputError: the target or the conversations are not there, or these are others.
    """
    check_given(against=target, data=data, chat_template=chat_template)
    identity = manifest.identity
    given = CaptureOptions(
        target=target,
        data=data,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    settings = CaptureSettings.check(recorded_options(root, manifest, given))
    conversations = open_conversations(settings.data, settings.rows)
    if (found := conversations.fingerprint()) != identity["data"]:
        raise InputError(
            f"--data {settings.data}: not the conversations that were captured (fingerprint "
            f"{identity['data']} there, {found} now); give the captured ones with --data"
        )
    try:
        loaded = load_target(settings.target, settings.device, settings.target_options)
    except InputError as error:
        raise InputError(str(error).replace("--target ", "--against ")) from None
    now = target_identity(loaded)
    around = {
        "device": settings.device.type,
        "tensor_parallel": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Recapture(
        identity_differences({key: identity.get(key) for key in now}, now),
        identity_differences({key: identity.get(key) for key in around}, around),
        CachePaths(root, manifest.num_shards),
        manifest,
        loaded,
        conversations,
        settings.rows,
    )
