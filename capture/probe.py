"""One tiny forward pass before any work: what the target is like and whether it can be captured."""

from dataclasses import dataclass

import torch
from PIL import Image

from dspark.capture.collate import encode
from dspark.capture.features import Features, capture_features
from dspark.capture.target import Target
from dspark.schemas.conversations import Conversation
from dspark.schemas.errors import InputError

_PICTURE = (96, 64)
_CONVERSATION: Conversation = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": Image.new("RGB", _PICTURE, (90, 120, 150))},
            {"type": "text", "text": "What is this?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A picture."}]},
]


@dataclass(frozen=True)
class Probe:
    """What the first forward pass showed.

    Attributes:
        hidden_size: H.
        vocab_size: V, width of the logits.
        position_rows: 1, or the rows of multi-axis rotary positions.
        features: of that pass, with logits.
    """

    hidden_size: int
    vocab_size: int
    position_rows: int
    features: Features


def probe_target(target: Target, layers: list[int], dtype: torch.dtype) -> Probe:
    """Run the target on one small made-up conversation with a picture.

    Raises:
        InputError: the target cannot be captured; the message says why.
    """
    try:
        inputs = encode([_CONVERSATION], target.processor)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"--target {target.id}: its processor and chat template do not render a conversation "
            f"with a picture ({str(error).strip().splitlines()[0]})"
        ) from None
    if target.image_token_id is None or not (inputs["input_ids"] == target.image_token_id).any():
        raise InputError(
            f"--target {target.id}: its rendered conversation holds no picture positions "
            f"(image token id {target.image_token_id}); the processor does not expand pictures"
        )
    if not inputs["loss_mask"].any():
        raise InputError(
            f"--target {target.id}: its chat template marks nothing as written by the assistant "
            "when a picture is present; update transformers, or mend the template's "
            "{% generation %} markers"
        )
    length = inputs["input_ids"].shape[1]
    features = capture_features(
        target, inputs, [length], layers=layers, dtype=dtype, with_logits=True
    )
    assert features.logits is not None
    return Probe(
        hidden_size=features.stored["inputs_embeds"].shape[-1],
        vocab_size=features.logits.shape[-1],
        position_rows=features.position_ids.shape[0],
        features=features,
    )
