"""One tiny forward pass before any work: what the target is like and whether it can be captured."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dspark.capture.rendering.encode import encode
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.picture_entry import embedded_otherwise, where_pictures_enter
from dspark.capture.targets.target import Target
from dspark.capture.workers.replica import reaching_peers
from dspark.schemas.conversations import Conversation
from dspark.schemas.errors import InputError

_SIZE = (96, 64)
PICTURES = (
    Image.new("RGB", _SIZE, (90, 120, 150)),
    Image.merge("RGB", [Image.linear_gradient("L").rotate(90 * i).resize(_SIZE) for i in range(3)]),
)


@dataclass(frozen=True)
class Probe:
    """What the first forward pass showed.

    Attributes:
        hidden_size: H.
        vocab_size: V, width of the logits.
        position_rows: 1, or the rows of multi-axis rotary positions.
        features: of that pass, with logits.
        observed: for the manifest, see ``docs/cache-format.md``.
    """

    hidden_size: int
    vocab_size: int
    position_rows: int
    features: Features
    observed: dict[str, Any]


def probe_target(target: Target, layers: list[int], dtype: torch.dtype) -> Probe:
    """Run the target on one small made-up conversation, with a picture if it takes pictures.

    A second pass with another picture shows where pictures enter.

    Raises:
        InputError: the target cannot be captured; the message says why.
    """
    inputs = probe_inputs(target, PICTURES[0])
    features = _run(target, inputs, layers, dtype)
    assert features.logits is not None
    if not all(stored.isfinite().all() for stored in features.stored.values()):
        raise InputError(
            f"--target {target.id}: on one small conversation its features are not all finite "
            f"numbers of type {str(dtype).removeprefix('torch.')}; if --dtype bf16 does not help, "
            "its weights are damaged"
        )
    observed: dict[str, Any] = {
        "inputs_embeds_from": features.embeds_source,
        "side_inputs": features.side_inputs,
        "averaged_streams": features.streams,
    }
    ids = inputs["input_ids"][0]
    if target.takes_pictures:
        other = _run(target, probe_inputs(target, PICTURES[1]), layers, dtype)
        observed["pictures_enter"] = where_pictures_enter(target, ids, features, other)
    observed["embedded_otherwise"] = embedded_otherwise(target, ids, features, dtype)
    return Probe(
        hidden_size=features.stored["inputs_embeds"].shape[-1],
        vocab_size=features.logits.shape[-1],
        position_rows=features.position_ids.shape[0],
        features=features,
        observed=observed,
    )


def _conversation(picture: Image.Image | None) -> Conversation:
    question: Conversation = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A picture."}]},
    ]
    if picture is not None:
        question[0]["content"].insert(0, {"type": "image", "image": picture})
    return question


def probe_inputs(target: Target, picture: Image.Image) -> dict[str, Tensor]:
    """A small conversation as the target's processor renders it, one row."""
    conversation = _conversation(picture if target.takes_pictures else None)
    try:
        inputs = encode([conversation], target.processor)
    except Exception as error:  # what processors and templates raise has no bound
        raise InputError(
            f"--target {target.id}: its processor and chat template do not render a conversation "
            f"{'with a picture ' if target.takes_pictures else ''}({_first_line(error)})"
        ) from None
    ids, image_id = inputs["input_ids"], target.image_token_id
    if target.takes_pictures and (image_id is None or not ids.eq(image_id).any()):
        raise InputError(
            f"--target {target.id}: its rendered conversation holds no picture positions "
            f"(image token id {image_id}); the chat template or the processor does "
            "not put pictures in"
        )
    if not inputs.pop("loss_mask").any():
        raise InputError(
            f"--target {target.id}: nothing of its rendered conversation is known to be written by "
            "the assistant; give a template that shows it with --chat-template FILE"
        )
    return inputs


def _run(
    target: Target, inputs: dict[str, Tensor], layers: list[int], dtype: torch.dtype
) -> Features:
    length = inputs["input_ids"].shape[1]
    try:
        with reaching_peers():
            return capture_features(
                target, inputs, [length], layers=layers, dtype=dtype, with_logits=True
            )
    except InputError:
        raise
    except Exception as error:  # what the code of models raises has no bound
        advice = "" if target.gathered is None else "; split it otherwise: --fsdp or --device-map"
        raise InputError(
            f"--target {target.id}: its forward pass fails on one small conversation "
            f"({type(error).__name__}: {_first_line(error)}){advice}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
