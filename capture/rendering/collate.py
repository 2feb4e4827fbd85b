"""From conversations to the tensors that the target runs on, unshifted, right-padded."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.encode import encode_batch
from dspark.schemas.conversations import Conversation


def dspark_vlm_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int
) -> dict[str, Tensor]:
    """Collate multimodal conversations into a DSpark-ready batch of fixed shape.

    Nothing is shifted and nothing is cut. Every conversation without a picture gets a fake one, so
    that all ranks of a sharded target enter the vision tower. Its tokens have ``attention_mask`` 0
    and stand after the whole conversation, where no real token can see them. ``HFMSDTargetModel``
    runs such a batch as it is; a bare model with multi-axis rotary positions (Qwen-VL and others)
    needs ``position_ids`` beside it, as ``dspark.capture.rendering.fake_positions`` computes them.

    Args:
        examples: B entries ``{"conversation": [...]}``.
        processor: the target's processor.
        max_length: T, tokens of every row.

    Returns:
        ``input_ids``, ``attention_mask``, ``loss_mask`` int64 ``[B, T]``, and the vision tensors of
        the processor.

    Raises:
        ValueError: a conversation has more than ``max_length`` tokens, its fake picture included,
            or cannot be rendered.
    """
    conversations: list[Conversation] = [list(e["conversation"]) for e in examples]
    tools = [e.get("tools") for e in examples]
    try:
        encoded = encode_batch(conversations, processor, tools, fake_image=True)
    except BadRowError as error:
        raise ValueError(str(error)) from None
    for i, used in enumerate(encoded.used):
        if used > max_length:
            raise ValueError(
                f"example {i}: {used} tokens, max_length is {max_length}; raise max_length or "
                "leave the example out"
            )
    return _pad(encoded.tensors, max_length, processor.tokenizer.pad_token_id)


def _pad(batch: dict[str, Tensor], max_length: int, pad_id: int) -> dict[str, Tensor]:
    """Pad every per-token tensor to ``[B, max_length]``; vision tensors stay as they are."""
    shape = batch["input_ids"].shape
    return {
        k: F.pad(v, (0, max_length - shape[1]), value=pad_id if k == "input_ids" else 0)
        if v.shape == shape
        else v
        for k, v in batch.items()
    }


def build_dspark_vlm_dataloader(
    dataset_cfg: Any,
    processor: Any,
    batch_size: int,
    max_length: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    dp_mesh: Any = None,
) -> DataLoader[Any]:
    """A loader of DSpark-ready batches (see ``dspark_vlm_collate_fn``).

    Args:
        dataset_cfg: anything with ``.instantiate()`` that returns a sequence of
            ``{"conversation": [...]}`` examples.
        processor: the target's processor.
        batch_size: B, per rank.
        max_length: T.
        shuffle: shuffle the examples each epoch.
        num_workers: worker processes that collate.
        distributed: give each data-parallel rank its own part.
        dp_mesh: one-dimensional ``DeviceMesh`` of the data-parallel ranks; the default group
            without.
    """
    dataset = dataset_cfg.instantiate()
    sampler: DistributedSampler[Any] | None = None
    if distributed:
        size, rank = (None, None) if dp_mesh is None else (dp_mesh.size(), dp_mesh.get_local_rank())
        sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=shuffle)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle and sampler is None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(dspark_vlm_collate_fn, processor=processor, max_length=max_length),
    )
