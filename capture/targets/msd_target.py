"""Frozen VLM target for multimodal speculative-decoding training without a cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.capture.rendering.fake_positions import position_ids
from dspark.capture.targets.backbone import find_backbone, find_head
from dspark.capture.targets.backbone_input import BackboneInput
from dspark.capture.targets.special_tokens import image_token_id
from dspark.schemas.shift import shift_left


@dataclass(frozen=True)
class MSDTargetBatch:
    """What an MSD draft learns from, for B rows of L tokens. Slot t predicts the features of t+1.

    Attributes:
        inputs_embeds: ``[B, L, H]``, fused embeddings of token t+1, zero tail.
        input_hidden_states: ``[B, L, H]``, the target's post-norm hidden state of token t.
        target_hidden_states: ``[B, L, H]``, the same of token t+1, zero tail.
        target_logits: ``[B, L, V]``, the target's logits of token t+1, zero tail.
        attention_mask: ``[B, L]``, as the target ran on it.
        loss_mask: bool ``[B, L]``, slots to learn from.
        image_mask: bool ``[B, L]``, whether token t+1 is a position of a real picture, false tail.
    """

    inputs_embeds: Tensor
    input_hidden_states: Tensor
    target_hidden_states: Tensor
    target_logits: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    image_mask: Tensor


class HFMSDTargetModel:
    """Expose image-aware feature supervision from a frozen Hugging Face VLM.

    Attributes:
        model: the frozen model, in eval mode.
        language_backbone: its language backbone.
        image_token_id: the placeholder id of picture positions.
    """

    def __init__(self, model: nn.Module) -> None:
        image_id = image_token_id(model.config)
        if image_id is None:
            raise ValueError(f"{type(model).__name__}: its config names no image token id")
        self.image_token_id = int(image_id)
        self.model: Any = model.eval()
        self.language_backbone = find_backbone(model)

    @torch.no_grad()
    def generate_batch(
        self, loss_mask: Tensor, model_inputs: dict[str, torch.Tensor]
    ) -> MSDTargetBatch:
        """Run the VLM and build shifted multimodal draft supervision.

        Args:
            loss_mask: bool ``[B, L]``, already aligned to next-token logits (slot t is set when
                token t+1 is to be learnt); no further shift is applied. Its last position is
                dropped, since the shifted supervision is zero there.
            model_inputs: forward inputs of the VLM, with ``input_ids`` and ``attention_mask``
                ``[B, L]``; image mask and attention mask are derived from these very tensors.
        """
        positions = position_ids(self.model, model_inputs, self.image_token_id)
        if positions is not None:
            model_inputs = {**model_inputs, "position_ids": positions}
        with BackboneInput(self.language_backbone) as backbone_input:
            last_hidden: list[Tensor] = []
            handle = self.language_backbone.register_forward_hook(
                lambda _module, _args, output: last_hidden.append(output[0])
            )
            try:
                logits = self.model(**model_inputs, use_cache=False).logits
            finally:
                handle.remove()
        hidden = last_hidden[0]
        mask = loss_mask.bool().clone()
        mask[:, -1] = False
        return MSDTargetBatch(
            inputs_embeds=shift_left(backbone_input.inputs_embeds),
            input_hidden_states=hidden,
            target_hidden_states=shift_left(hidden),
            target_logits=shift_left(logits),
            attention_mask=model_inputs["attention_mask"],
            loss_mask=mask,
            image_mask=shift_left(
                (model_inputs["input_ids"] == self.image_token_id)
                & model_inputs["attention_mask"].bool()
            ),
        )

    def get_lm_head(self) -> nn.Module:
        """The frozen language-model head that the draft's loss applies."""
        head = find_head(self.model)
        assert head is not None
        return head
