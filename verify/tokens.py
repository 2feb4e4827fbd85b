"""What the integer fields of a row must be, whatever their digests say."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dspark.schemas.fields import MASKS
from dspark.schemas.manifest import Manifest

TOKEN_FIELDS = ("input_ids", "position_ids", *MASKS)


def token_problems(
    stored: Mapping[str, np.ndarray], manifest: Manifest, image_tokens: int, loss_tokens: int
) -> Iterator[tuple[str, str]]:
    """What is wrong with ids, positions and masks of one row: (field, problem).

    Args:
        stored: ``TOKEN_FIELDS``, real tokens only: int32 ids ``[L]`` and positions ``[R * L]``,
            uint8 masks ``[L]``.
        manifest: of the cache.
        image_tokens: of the row, says the index.
        loss_tokens: of the row, says the index.
    """
    ids, image, loss = stored["input_ids"], stored["image_mask"], stored["loss_mask"]
    target = manifest.target
    text = ids[image == 0]
    vocabulary = max(target.vocab_size, target.embedding_rows)
    if ((text < 0) | (text >= vocabulary)).any():
        yield "input_ids", f"an id is beyond the vocabulary of {vocabulary:,}"
    if (stored["position_ids"] < 0).any():
        yield "position_ids", "a position is negative"
    if (stored["attention_mask"] != 1).any():
        yield "attention_mask", "a real token is not 1"
    for name, count in (("loss_mask", loss_tokens), ("image_mask", image_tokens)):
        mask = stored[name]
        if (mask > 1).any():
            yield name, "it holds something else than 0 and 1"
        elif (found := int(mask.sum(dtype=np.int64))) != count:
            yield name, f"{found:,} tokens are 1, the index counts {count:,}"
    placeholder: Any = -1 if target.image_token_id is None else target.image_token_id
    if ((image != 0) != (ids == placeholder)).any():
        yield "image_mask", "it is not 1 exactly where input_ids is the picture token"
    if ((loss != 0) & (image != 0)).any():
        yield "loss_mask", "a picture position is supervised"
