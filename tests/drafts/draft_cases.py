"""Small drafts with random weights, and batches with every awkward thing in them."""

import torch
from torch import Tensor, nn

from dspark.schemas.manifest import Manifest, TargetFacts
from dspark.train_from_cache.drafts.dflash import DFlashConfig, DFlashDraft
from dspark.train_from_cache.drafts.dspark import DSparkConfig, DSparkDraft
from dspark.train_from_cache.drafts.msd import MSDConfig, MSDDraft
from dspark.train_from_cache.target_head import TargetHead

VOCAB, HIDDEN, HEAD_DIM, THETA = 13, 8, 4, 100.0
LAYERS = (0, 2, 3)
DIMS = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "max_position_embeddings": 64,
}


def randomise(module: nn.Module, seed: int) -> None:
    """Every weight away from its special starting value, zeros and ones included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.4 * noise)


def dspark(seed: int = 0, **config: object) -> DSparkDraft:
    """A float64 DSpark draft of two layers and blocks of three."""
    entries = {
        **DIMS,
        "num_hidden_layers": 2,
        "block_size": 3,
        "mask_token_id": 12,
        "target_layer_ids": list(LAYERS),
        "num_target_layers": 6,
        "num_anchors": 64,
        "markov_rank": 5,
        **config,
    }
    draft = DSparkDraft(DSparkConfig(**entries)).double()
    randomise(draft, seed)
    return draft


def dflash(seed: int = 0, *, bias: bool = True, **config: object) -> DFlashDraft:
    """A float64 DFlash draft of two layers and blocks of four, with a head that has a bias."""
    entries = {
        **DIMS,
        "num_hidden_layers": 2,
        "block_size": 4,
        "mask_token_id": 12,
        "target_layer_ids": list(LAYERS),
        "num_target_layers": 6,
        "num_anchors": 64,
        **config,
    }
    draft = DFlashDraft(DFlashConfig(**entries)).double()
    draft.attach_head(head(seed + 1, bias=bias))
    randomise(draft, seed)
    return draft


def msd(seed: int = 0, *, bias: bool = True, **config: object) -> MSDDraft:
    """A float64 MSD draft with a head that has a bias."""
    entries = {
        **DIMS,
        "attention_bias": bias,
        "num_draft_tokens": 4,
        "feature_noise": 0.0,
        **config,
    }
    draft = MSDDraft(MSDConfig(**entries)).double()
    draft.attach_head(head(seed + 1, bias=True))
    randomise(draft, seed)
    return draft


def head(seed: int = 1, *, bias: bool = False) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(
        torch.randn(VOCAB, HIDDEN, generator=generator),
        torch.randn(VOCAB, HIDDEN, generator=generator),
        torch.randn(VOCAB, generator=generator) if bias else None,
    )


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Two rows of 12 and 9 tokens.

    Several supervised spans, one of them a single token, one that reaches the row's end; two
    picture spans in each row; a token inside the first row that nobody may attend to (as those of
    a fake picture); noise where a real batch has zeros, which must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, length = 2, 12

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def mask(*spans: list[int]) -> Tensor:
        out = torch.zeros(rows, length, dtype=torch.uint8)
        for row, positions in enumerate(spans):
            out[row, positions] = 1
        return out

    return {
        "input_ids": torch.randint(0, VOCAB, (rows, length), generator=generator).int(),
        "attention_mask": mask([0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(9))),
        "loss_mask": mask([4, 5, 6, 8, 10, 11], [1, 2, 3, 4, 5, 7, 8]),
        "image_mask": mask([1, 7, 9], [0, 6]),
        "inputs_embeds": normal(rows, length, HIDDEN),
        "last_hidden_state": normal(rows, length, HIDDEN),
        "logits": 2 * normal(rows, length, VOCAB),
        **{f"hidden_states.{k}": normal(rows, length, HIDDEN) for k in LAYERS},
        "length": torch.tensor([12, 9]),
        "sample": torch.tensor([0, 1]),
    }


def manifest(**target: object) -> Manifest:
    """Of a target with 8 layers."""
    facts = {
        "id": "t",
        "revision": "",
        "architecture": "T",
        "model_type": "qwen2_5_vl",
        "text_model_type": "qwen2_5_vl_text",
        "num_layers": 8,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "embedding_rows": VOCAB,
        "image_token_id": 11,
        "video_token_id": None,
        "eos_token_ids": [1],
        "pad_token_id": 0,
        "text": {
            "intermediate_size": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "max_position_embeddings": 64,
            "tokenizer_size": 11,
        },
        **target,
    }
    return Manifest(
        identity={},
        target=TargetFacts(**facts),
        data="",
        num_samples=1,
        rows_per_shard=1,
        num_shards=1,
        max_length=16,
        dtype="bf16",
        fields=(),
        layers=(0, 1, 2),
        logits="head",
        versions={},
        shard_bytes=0,
    )
