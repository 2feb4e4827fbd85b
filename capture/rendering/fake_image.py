"""A picture for rows without one, so that every rank of a sharded target enters the vision tower.

The fake picture stands after the whole conversation. There no real token can see it through causal
attention, and it moves no real token's position; ``attention_mask`` 0 hides it where attention is
not causal. In a batch for a target with multi-axis rotary positions, rows with a fake picture come
last (see ``fakes_last``).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from PIL import Image

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.render import Renderer, renderer_of
from dspark.schemas.errors import InputError

FAKE_IMAGE = Image.new("RGB", (64, 64), (128, 128, 128))


def needs_fake_image(option: str, processor: Any) -> bool:
    """Whether text-only rows get a fake picture; never in a target that takes no pictures.

    ``auto`` gives none: a target under ``--fsdp`` gathers its vision tower with the root, so that
    workers without pictures need not enter it.

    Args:
        option: ``auto``, ``always`` or ``never``.
        processor: of the target, or the tokenizer of a text-only target.

    Raises:
        InputError: they should, but a picture cannot be put after a conversation.
    """
    renderer = renderer_of(processor)
    if not renderer.takes_pictures or option != "always":
        return False
    try:
        fake_text(renderer)
    except BadRowError as error:
        raise InputError(f"--fake-image {option}: {error}; use --fake-image never") from None
    return True


@lru_cache(maxsize=4)
def fake_text(renderer: Renderer) -> str:
    """The text that puts a picture after a prompt without changing the prompt's tokens.

    Raises:
        BadRowError: there is none.
    """
    if renderer.image_token is None:
        raise BadRowError("no fake picture", "the processor names no placeholder")
    prompt = renderer.text(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        ]
    )
    plain = renderer.tokens(prompt)[0]
    # A picture may begin with a line break, which joins one at the end of the prompt.
    for between in ("", renderer.tokenizer.pad_token, renderer.tokenizer.eos_token):
        tail = (between or "") + renderer.picture_text
        ids = renderer.processor(
            text=[prompt + tail], images=[[FAKE_IMAGE]], **renderer.token_options(prompt)
        )["input_ids"][0]
        if list(ids[: len(plain)]) == plain:
            return tail
    raise BadRowError("no fake picture", "it changes the tokens before it")


def fakes_last(faked: Sequence[bool]) -> list[int]:
    """The order in which rows of a batch are run: real pictures first.

    Targets that compute multi-axis positions step through the pictures of a batch, but skip tokens
    with ``attention_mask`` 0: after a fake picture every row would read the size of the wrong one.
    """
    return sorted(range(len(faked)), key=lambda i: faked[i])
