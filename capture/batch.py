"""One batch of a shard: run the target, then what is stored of each row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.logits import stored_logits
from dspark.capture.targets.target import Target
from dspark.capture.workers.replica import LOST_PEER, is_lost_peer
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.errors import InputError
from dspark.schemas.fields import Field
from dspark.schemas.manifest import Manifest

_NAMED_ROWS = 8


def run_batch(
    inputs: BatchInputs, manifest: Manifest, target: Target, *, with_head: bool
) -> Features:
    """Run the target on one batch.

    Args:
        inputs: the batch.
        manifest: of the cache that is written or compared with.
        target: the frozen target.
        with_head: compute logits even where the cache stores none.

    Raises:
        InputError: the forward pass fails; the message names the rows.
    """
    try:
        return capture_features(
            target,
            inputs.tensors,
            [len(row) for row in inputs.rows],
            layers=manifest.layers,
            dtype=torch_dtype(FLOAT_CODES[manifest.dtype]),
            with_logits=with_head or manifest.logits != "head",
        )
    except InputError:
        raise
    except torch.OutOfMemoryError:
        raise InputError(
            f"--batch-tokens {manifest.identity['batch_tokens']}: a batch of that size does not "
            "fit into the device's memory; give a smaller number and another --out, or a device "
            "with more free memory"
        ) from None
    except Exception as error:  # what the code of models raises has no bound
        if is_lost_peer(error):
            raise InputError(LOST_PEER) from None
        numbers = sorted(row.sample for row in inputs.rows)
        rows = ", ".join(map(str, numbers[:_NAMED_ROWS]))
        more = ", …" if len(numbers) > _NAMED_ROWS else ""
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(
            f"--target {target.id}: its forward pass fails on --data {manifest.data}, rows "
            f"{rows}{more} ({type(error).__name__}: {first_line})"
        ) from error


def split_batch(
    rows: list[EncodedRow], features: Features, manifest: Manifest
) -> Iterator[tuple[EncodedRow, dict[str, Tensor]]]:
    """Each row of the batch with all tensors that it may store, ``[L, …]``, on the CPU."""
    packed = dict(features.stored)
    if manifest.logits != "head":
        assert features.logits is not None
        dtype = torch_dtype(FLOAT_CODES[manifest.dtype])
        packed |= stored_logits(features.logits, manifest.logits, dtype)
    packed = {k: v.cpu() for k, v in packed.items()}
    positions = features.position_ids.cpu()
    start = 0
    for row in rows:
        where = slice(start, start + len(row))
        start += len(row)
        tensors = {k: v[where] for k, v in packed.items()}
        tensors |= {
            "input_ids": row.input_ids.int(),
            "attention_mask": torch.ones(len(row), dtype=torch.uint8),
            "loss_mask": row.loss_mask.to(torch.uint8),
            "image_mask": row.image_mask.to(torch.uint8),
        }
        if (field := manifest.field("position_ids")) is not None:  # None in an extension
            tensors["position_ids"] = _positions(positions[:, where], field)
        yield row, tensors


def _positions(positions: Tensor, field: Field) -> Tensor:
    """As stored; a batch without pictures may have one row of positions where others have 3."""
    if len(field.row_shape) == 1:
        return positions[0]
    return positions.expand(field.row_shape[0], -1)
