"""From conversations to the tensors that the target runs on, unshifted, right-padded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.assistant_spans import Span
from dspark.capture.rendering.control_tokens import check_no_control_tokens
from dspark.capture.rendering.fake_image import FAKE_IMAGE, fake_text
from dspark.capture.rendering.loss_mask import derive_loss_mask
from dspark.capture.rendering.render import Renderer, Tools, first_line, pictures_of, renderer_of
from dspark.schemas.conversations import Conversation

_OFFSETS = {"return_offsets_mapping": True, "return_text_replacement_offsets": True}


@dataclass(frozen=True)
class Encoded:
    """A batch of conversations.

    Attributes:
        tensors: all keys of the processor ``[B, L]``, right-padded, and ``loss_mask`` if asked for.
        lengths: tokens of each conversation.
        used: tokens of each row: the conversation and its fake picture.
    """

    tensors: dict[str, Tensor]
    lengths: list[int]
    used: list[int]


@dataclass(frozen=True)
class _Tokenised:
    """What the processor returned.

    Attributes:
        tensors: for the model.
        offsets: of every token in the expanded text, if the tokenizer gives them.
        expanded: for every row what was expanded, if the processor says so.
    """

    tensors: dict[str, Tensor]
    offsets: list[list[Span]] | None = None
    expanded: list[list[dict[str, Any]]] | None = None


def encode(
    conversations: Sequence[Conversation], processor: Any, tools: Sequence[Tools] | None = None
) -> dict[str, Tensor]:
    """Render, tokenise and pad conversations; every key that the processor returns is kept.

    Args:
        conversations: B conversations.
        processor: of the target, or the tokenizer of a text-only target, with a chat template.
        tools: for each conversation, the schemas of the functions that the assistant may call.

    Returns:
        ``input_ids``, ``attention_mask`` int64 ``[B, L]``, ``loss_mask`` int64 ``[B, L]`` (1 = this
        token itself was written by the assistant), and the processor's other tensors.

    Raises:
        BadRowError: see ``encode_batch``.
    """
    return encode_batch(conversations, processor, tools).tensors


def encode_batch(
    conversations: Sequence[Conversation],
    processor: Any,
    tools: Sequence[Tools] | None = None,
    *,
    loss_mask: bool = True,
    mask_reasoning: bool = False,
    fake_image: bool = False,
) -> Encoded:
    """Render, tokenise and pad conversations; every key that the processor returns is kept.

    Args:
        conversations: B conversations.
        processor: of the target, or the tokenizer of a text-only target, with a chat template.
        tools: for each conversation, the schemas of the functions that the assistant may call.
        loss_mask: find out what the assistant wrote.
        mask_reasoning: leave ``<think>…</think>`` of the assistant unsupervised.
        fake_image: append a picture to each conversation without one, for targets that take
            pictures. Its tokens come last in the row and have ``attention_mask`` 0: no real token
            can see them or has its position moved by them.

    Raises:
        BadRowError: the template or the processor refuses a conversation, a text holds a control
            token (which would move a picture or end a turn), or what the assistant wrote cannot be
            told with certainty.
    """
    renderer = renderer_of(processor)
    given: list[Tools] = [None] * len(conversations) if tools is None else list(tools)
    for conversation, schemas in zip(conversations, given, strict=True):
        check_no_control_tokens(renderer, conversation, schemas)
    prompts = [renderer.text(c, t) for c, t in zip(conversations, given, strict=True)]
    pictures = [pictures_of(c) for c in conversations]
    if any(pictures) and not renderer.takes_pictures:
        raise BadRowError("pictures for a text-only target")
    faked = [fake_image and renderer.takes_pictures and not p for p in pictures]
    tail = fake_text(renderer) if any(faked) else ""
    out = _tokenise(
        renderer,
        [p + tail if fake else p for p, fake in zip(prompts, faked, strict=True)],
        [[FAKE_IMAGE] if fake else p for p, fake in zip(pictures, faked, strict=True)],
        with_offsets=loss_mask,
    )
    tensors = out.tensors
    _check_right_padded(tensors["attention_mask"])
    used = tensors["attention_mask"].sum(1).tolist()
    for i, prompt in enumerate(prompts):
        if faked[i]:
            _hide_fake(renderer, prompt, tensors["input_ids"][i], tensors["attention_mask"][i])
    lengths = tensors["attention_mask"].sum(1).tolist()
    if loss_mask:
        tensors["loss_mask"] = torch.zeros_like(tensors["input_ids"])
        for i, length in enumerate(lengths):
            expanded = out.expanded[i] if out.expanded else None
            tensors["loss_mask"][i, :length] = derive_loss_mask(
                renderer,
                conversations[i],
                given[i],
                prompts[i],
                tensors["input_ids"][i, :length].tolist(),
                out.offsets[i][:length] if out.offsets else None,
                expanded if pictures[i] else [],
                mask_reasoning=mask_reasoning,
            )
    return Encoded(tensors, lengths, used)


def _tokenise(
    renderer: Renderer, prompts: list[str], pictures: list[list[Any]], *, with_offsets: bool
) -> _Tokenised:
    """Run the processor; where it refuses to give offsets, without them."""
    options: dict[str, Any] = {
        "padding": True,
        "truncation": False,
        "padding_side": "right",
        "return_tensors": "pt",
        **renderer.token_options(prompts[0]),
    }
    if renderer.takes_pictures and any(pictures):
        options["images"] = pictures
    call = renderer.processor
    try:
        if not (with_offsets and renderer.tokenizer.is_fast and renderer.gives_offsets):
            return _Tokenised(_tensors(call(text=prompts, **options)))
        extra = _OFFSETS if renderer.takes_pictures else {"return_offsets_mapping": True}
        try:
            returned = dict(call(text=prompts, **options, **extra))
        except Exception:
            # Either the row is bad, which the next line shows, or offsets are.
            out = _Tokenised(_tensors(call(text=prompts, **options)))
            renderer.gives_offsets = False
            return out
    except Exception as error:  # what processors raise has no bound
        raise BadRowError("the processor refuses it", first_line(error)) from None
    offsets = returned.pop("offset_mapping", None)
    expanded = returned.pop("text_replacement_offsets", None)
    if isinstance(expanded, Tensor):  # some processors make one of it where there is none
        expanded = expanded.tolist()
    if offsets is not None:
        offsets = [[(a, b) for a, b in row] for row in torch.as_tensor(offsets).tolist()]
    return _Tokenised(_tensors(returned), offsets, expanded)


def _tensors(returned: Any) -> dict[str, Tensor]:
    tensors = {}
    for key, value in dict(returned).items():
        try:
            tensors[key] = torch.as_tensor(value)
        except (TypeError, ValueError):
            tensors[key] = value  # lists of tensors of different sizes
    return tensors


def _check_right_padded(attention_mask: Tensor) -> None:
    if (attention_mask.diff(dim=1) > 0).any():
        raise BadRowError("the processor pads on the left", "or hides tokens inside of a row")


def _hide_fake(renderer: Renderer, prompt: str, ids: Tensor, attention_mask: Tensor) -> None:
    """Set ``attention_mask`` to 0 on the tokens of the fake picture after ``prompt``."""
    plain = renderer.tokens(prompt)[0]
    real = int(attention_mask.sum())
    if len(plain) >= real or ids[: len(plain)].tolist() != plain:
        raise BadRowError("no fake picture", "it changes the tokens before it")
    attention_mask[len(plain) :] = 0
