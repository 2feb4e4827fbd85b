"""Logits of some rows at a time are those that the model gives all at once."""

import pytest
import torch
from family_models import BENT_LOGITS, FAMILIES, make_inputs, make_model
from test_families import target_of

from dspark.capture.targets.features import capture_features

OTHERS = ("llava", "qwen2_5_vl", "gemma3n", "chameleon", "idefics2", "granite4_vision")


@pytest.mark.parametrize("family", sorted({*BENT_LOGITS, *OTHERS} & {*FAMILIES}))
@torch.inference_mode()
def test_parts_are_the_whole(family: str) -> None:
    model = make_model(family)
    inputs, lengths = make_inputs(family)
    target = target_of(model)
    whole, parted = (
        capture_features(
            target,
            inputs,
            lengths,
            layers=(),
            dtype=torch.float32,
            with_logits=True,
            logits_at_once=most,
        )
        for most in (None, 5)
    )
    assert whole.logits is not None and parted.logits is not None
    parts = [parted.logits, *parted.more_logits]
    assert [len(p) for p in parts[:-1]] == [5] * (len(parts) - 1)
    assert "forward" not in vars(model.base_model)
    # Another number of rows in a product of matrices: summation order may differ.
    torch.testing.assert_close(torch.cat(parts), whole.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(parted.stored["last_hidden_state"], whole.stored["last_hidden_state"])
