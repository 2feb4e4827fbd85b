"""Tiny random models of many families, each with a batch of inputs made by hand."""

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from family_parts import Family
from listed_families import LISTED, REFUSED
from other_families import OTHERS
from tiny_targets import ENDOFTEXT, IMAGE
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES: dict[str, Family] = LISTED | OTHERS

# Where Hugging Face's own hidden_states are not what the next layer receives.
ADDED_BETWEEN_LAYERS = {
    "qwen3_vl",
    "qwen3_vl_moe",
    "cohere_compass",
    "granite4_vision",
    "granite_docling",
}
# Axis of the layer inputs that counts residual streams (-1: inside the last), and how many.
STREAMS = {"gemma3n": (0, 3), "glm5_next": (2, 3), "hy_v4_vl": (2, 3), "qwen4_exp": (-1, 3)}
# Scaled or extended inside the backbone, so that hidden_states[0] is not inputs_embeds.
CHANGED_INSIDE = {"granite4_vision", "granite_docling", *STREAMS}
# More is done to the logits than the head.
BENT_LOGITS = {
    "gemma3n",
    "gemma4",
    "paligemma2",
    "granite4_vision",
    "granite_docling",
    "chameleon",
    "mistral_large4",
    "cohere_compass",
}


class _VisionStub(nn.Module):
    """Stands in for the timm tower of gemma3n: 4 vectors of width 16 a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, 16, 16)

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.projection(pixel_values))


def make_model(family: str, **config: Any) -> PreTrainedModel:
    """A random model in eval mode; all weights perturbed, so that norms and biases matter."""
    torch.manual_seed(0)
    settings = deepcopy({**(FAMILIES | REFUSED)[family].config, **config})
    model_type = settings.pop("model_type", family)
    configuration = CONFIG_MAPPING[model_type](**settings)
    build = AutoModel.from_config

    def without_timm(config: Any, **how: Any) -> nn.Module:
        stub = config.model_type in ("gemma3n_vision", "gemma3n_audio")
        return _VisionStub() if stub else build(config, **how)

    with patch.object(AutoModel, "from_config", without_timm):
        model = AutoModelForImageTextToText.from_config(configuration)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.12 if p.ndim > 1 else 0.05))
    return model.eval().requires_grad_(False)


def make_inputs(family: str, image_id: int = IMAGE) -> tuple[dict[str, Tensor], list[int]]:
    """Two rows with a picture each, the second shorter and padded; and their lengths."""
    torch.manual_seed(1)
    spec = (FAMILIES | REFUSED)[family]
    lengths = [spec.tokens + 11, spec.tokens + 7]
    ids = torch.randint(0, 240, (2, lengths[0]))
    for row, start in enumerate((3, 2)):
        ids[row, start : start + spec.tokens] = image_id
    ids[1, lengths[1] :] = ENDOFTEXT
    mask = torch.ones_like(ids)
    mask[1, lengths[1] :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, **spec.pixels()}
    if spec.types:
        inputs[spec.types] = (ids == image_id).long()
    return inputs, lengths
