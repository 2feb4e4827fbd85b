"""Multi-axis rotary positions of a batch in which rows end in fake pictures."""

import inspect
from typing import Any

import torch
from torch import Tensor


def position_ids(model: Any, inputs: dict[str, Tensor], image_token_id: int) -> Tensor | None:
    """``[R, B, L]`` positions to pass to the model beside ``inputs``, or None where it needs none.

    Models with multi-axis positions step through the pictures of a batch but skip tokens with
    ``attention_mask`` 0, so after a fake picture each row would read the size of the wrong one.
    Here fake pictures are counted; they come last in their rows, so no real token is moved.

    Args:
        model: a Hugging Face model.
        inputs: as ``dspark_vlm_collate_fn`` makes them.
        image_token_id: the placeholder of picture positions.
    """
    get_rope_index = getattr(getattr(model, "model", model), "get_rope_index", None)
    picture = inputs["input_ids"] == image_token_id
    faked = (picture & (inputs["attention_mask"] == 0)).any(1)
    if get_rope_index is None or not faked.any():
        return None
    columns = torch.arange(picture.shape[1], device=picture.device)
    last = (picture * columns).amax(1)
    counted = inputs["attention_mask"].clone()
    counted[faked[:, None] & (columns <= last[:, None])] = 1
    names = inspect.signature(get_rope_index).parameters
    given = {k: v for k, v in inputs.items() if k in names}
    positions = get_rope_index(**{**given, "attention_mask": counted})[0]
    assert isinstance(positions, Tensor)
    return positions
