"""From conversations to the tensors that the target runs on, unshifted, right-padded."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from dspark.capture.fake_image import has_image, inject_fake_image, mask_fake_tokens
from dspark.schemas.conversations import Conversation


def encode(conversations: Sequence[Conversation], processor: Any) -> dict[str, Tensor]:
    """Render, tokenise and pad conversations; every key that the processor returns is kept.

    Args:
        conversations: B conversations.
        processor: of the target, with a chat template that marks what the assistant writes
            (``{% generation %}``).

    Returns:
        ``input_ids``, ``attention_mask`` int64 ``[B, L]``, ``loss_mask`` int64 ``[B, L]`` (1 = this
        token itself was written by the assistant), and the processor's other tensors.

    Raises:
        ValueError: the processor refuses the input, or a text holds a control token (which would
            move a picture or end a turn).
    """
    _check_no_control_tokens(conversations, processor)
    processor.tokenizer.padding_side = "right"
    inputs = processor.apply_chat_template(
        list(conversations),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "truncation": False},
    )
    tensors = {k: torch.as_tensor(v) for k, v in inputs.items()}
    tensors["loss_mask"] = tensors.pop("assistant_masks") * tensors["attention_mask"]
    return tensors


def _check_no_control_tokens(conversations: Sequence[Conversation], processor: Any) -> None:
    control = {*processor.tokenizer.all_special_tokens, getattr(processor, "image_token", None)}
    for conversation in conversations:
        for message in conversation:
            content: Any = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            for text in (part.get("text") or "" for part in parts):
                if found := next((c for c in control if c and c in text), None):
                    raise ValueError(f"a text holds the control token {found}")


def dspark_vlm_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int
) -> dict[str, Tensor]:
    """Collate multimodal conversations into a DSpark-ready batch of fixed shape.

    Nothing is shifted and nothing is cut. Every conversation without a picture gets a fake one, so
    that all ranks of a sharded target enter the vision tower; its tokens have ``attention_mask`` 0.

    Args:
        examples: B entries ``{"conversation": [...]}``.
        processor: the target's processor.
        max_length: T, tokens of every row.

    Returns:
        ``input_ids``, ``attention_mask``, ``loss_mask`` int64 ``[B, T]``, and the vision tensors of
        the processor.

    Raises:
        ValueError: a conversation has more than ``max_length`` tokens, or no user turn to hold a
            fake picture.
    """
    conversations: list[Conversation] = [list(e["conversation"]) for e in examples]
    injected = [c if has_image(c) else inject_fake_image(c) for c in conversations]
    batch = encode(injected, processor)
    lengths = batch["attention_mask"].sum(1).tolist()
    if max(lengths) > max_length:
        i = next(i for i, length in enumerate(lengths) if length > max_length)
        raise ValueError(
            f"example {i}: {lengths[i]} tokens, max_length is {max_length}; raise max_length or "
            "leave the example out"
        )
    batch = _pad(batch, max_length, processor.tokenizer.pad_token_id)
    for i, (length, original, used) in enumerate(
        zip(lengths, conversations, injected, strict=True)
    ):
        if used is original:
            continue
        plain = encode([original], processor)["input_ids"][0]
        fake = mask_fake_tokens(batch["input_ids"][i, :length], plain)
        batch["attention_mask"][i, :length][fake] = 0
        batch["loss_mask"][i, :length][fake] = 0
    return batch


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
