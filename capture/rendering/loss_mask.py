"""The loss mask: 1 exactly on the tokens that the assistant wrote, with the end of each turn."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.assistant_spans import Span, Written, find_written
from dspark.capture.rendering.render import Renderer, Tools
from dspark.capture.rendering.token_origins import (
    TokenOrigins,
    align,
    decode,
    from_offsets,
    read_along,
)
from dspark.schemas.conversations import Conversation


def derive_loss_mask(
    renderer: Renderer,
    messages: Conversation,
    tools: Tools,
    prompt: str,
    ids: Sequence[int],
    offsets: Sequence[Span] | None,
    expanded: Sequence[dict[str, Any]] | None,
    *,
    mask_reasoning: bool,
) -> Tensor:
    """The loss mask of one row.

    Args:
        renderer: of the target.
        messages: the conversation.
        tools: schemas of the functions that the assistant may call.
        prompt: the conversation rendered, pictures not expanded.
        ids: L tokens of the row, pictures expanded.
        offsets: of the tokens in the expanded text, from a fast tokenizer.
        expanded: what the processor says it expanded (``text_replacement_offsets``); None if it
            does not say.
        mask_reasoning: leave ``<think>…</think>`` out.

    Returns:
        int64 ``[L]``.

    Raises:
        BadRowError: it cannot be told with certainty what the assistant wrote.
    """
    written = find_written(renderer, messages, tools, prompt)
    if offsets is not None and expanded is not None:
        origins = from_offsets(offsets, expanded)
        if _decodes_to(renderer.tokenizer, ids, prompt, written, origins):
            return supervise(prompt, written, origins, mask_reasoning=mask_reasoning)
    plain_ids, plain = renderer.tokens(prompt)
    if plain is None:
        plain = read_along(renderer.tokenizer, prompt, plain_ids)
    origins = align(ids, plain_ids, plain, renderer.placeholder_ids)
    if not _decodes_to(renderer.tokenizer, ids, prompt, written, origins):
        raise BadRowError(
            "loss mask cannot be derived", "the tokens found do not decode to the assistant's text"
        )
    return supervise(prompt, written, origins, mask_reasoning=mask_reasoning)


def supervise(
    prompt: str, written: Written, origins: TokenOrigins, *, mask_reasoning: bool
) -> Tensor:
    """int64 ``[L]``: 1 on the tokens that the assistant wrote, if asked without its reasoning."""
    mask = torch.zeros_like(origins.start)
    for span in written.spans:
        mask[origins.within(prompt, span)] = 1
    if mask_reasoning:
        for span in written.reasoning:
            mask[origins.touching(span)] = 0
    return mask


def _decodes_to(
    tokenizer: Any, ids: Sequence[int], prompt: str, written: Written, origins: TokenOrigins
) -> bool:
    """Whether the tokens found for each turn decode to its characters, spaces left aside."""
    for span in written.spans:
        tokens = [ids[i] for i in origins.within(prompt, span).nonzero().flatten().tolist()]
        expected = _squeezed(prompt[slice(*span)])
        decoded = _squeezed(decode(tokenizer, tokens))
        if expected == decoded:
            continue
        # Letters beyond a border come in with the token over it.
        inner = _squeezed(decode(tokenizer, tokens[1:-1]))
        if expected and expected in decoded and inner in expected:
            continue
        # Some tokenizers fold letters, or lack some.
        alone = tokenizer(prompt[slice(*span)], add_special_tokens=False)["input_ids"]
        folded = _squeezed(decode(tokenizer, alone))
        if not folded or folded not in decoded:
            return False
    return True


def _squeezed(text: str) -> str:
    return "".join(text.split())
