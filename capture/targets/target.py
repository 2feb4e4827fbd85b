"""The frozen target: a Hugging Face model with its processor or, text only, its tokenizer."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.capture.targets.backbone import decoder_layers, find_head
from dspark.capture.targets.fully_sharded import original_class
from dspark.capture.targets.head_weights import read_head_weights
from dspark.capture.targets.special_tokens import eos_token_ids, image_token_id, video_token_id
from dspark.schemas.manifest import TargetFacts

_TEXT_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Target:
    """A frozen model and what capture needs of it.

    Attributes:
        id: folder or Hugging Face id.
        revision: commit of the Hugging Face repository, or an empty string for a folder.
        fingerprint: of the weights.
        model: in eval mode.
        processor: of the model; the tokenizer itself for a text-only target.
        backbone: the language backbone.
        device: where the model's inputs go.
        gathered: of a model that is split over several workers, its head tensors in full.
    """

    id: str
    revision: str
    fingerprint: str
    model: Any
    processor: Any
    backbone: Any
    device: torch.device
    gathered: dict[str, Tensor] | None = None

    @property
    def takes_pictures(self) -> bool:
        """Whether its processor renders pictures; a text-only target has only a tokenizer."""
        return self.tokenizer is not self.processor

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def num_layers(self) -> int:
        return len(decoder_layers(self.backbone))

    @property
    def text_config(self) -> Any:
        """The config of the language part."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def image_token_id(self) -> int | None:
        """Placeholder of a picture position; None in a text-only target."""
        return image_token_id(self.model.config, self.processor) if self.takes_pictures else None

    @property
    def embedding(self) -> nn.Module:
        """The input embedding of text."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    @property
    def head(self) -> nn.Module | None:
        """The language-model head, or None where the model has no module for it."""
        return find_head(self.model)

    def head_tensors(self) -> dict[str, Tensor]:
        """What ``head.safetensors`` holds, on the CPU (see ``read_head_weights``)."""
        if self.gathered is not None:
            return self.gathered
        return read_head_weights(self.model, self.backbone, self.device)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """What the input embedding returns for ids ``[R]``: ``[R, H]``."""
        if self.gathered is not None:
            return F.embedding(ids.cpu(), self.gathered["embed_tokens.weight"])
        embedded: Tensor = self.embedding(ids.to(self.device))
        return embedded

    def config_hash(self) -> str:
        """sha256 of the model's config, 16 hex digits."""
        return short_hash(_stable(self.model.config.to_dict()))

    def processor_hash(self) -> str:
        """sha256 of the processor's settings and of the whole tokenizer, 16 hex digits."""
        settings = _stable(self.processor.to_dict()) if self.takes_pictures else {}
        return short_hash([settings, _tokenizer_state(self.tokenizer)])

    def chat_template_hash(self) -> str:
        """sha256 of the chat template, 16 hex digits."""
        return short_hash(self.processor.chat_template)

    def facts(self, hidden_size: int, vocab_size: int, observed: dict[str, Any]) -> TargetFacts:
        """What the manifest says of the target.

        Args:
            hidden_size: H, as observed.
            vocab_size: V, as observed.
            observed: what the first forward pass showed.
        """
        config = self.model.config
        text = self.text_config
        pictures = self.takes_pictures
        return TargetFacts(
            id=self.id,
            revision=self.revision,
            architecture=original_class(self.model).__name__,
            model_type=config.model_type,
            text_model_type=text.model_type,
            num_layers=self.num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            embedding_rows=self.model.get_input_embeddings().weight.shape[0],
            image_token_id=self.image_token_id,
            video_token_id=video_token_id(config, self.processor) if pictures else None,
            eos_token_ids=eos_token_ids(self.model, self.tokenizer),
            pad_token_id=self.tokenizer.pad_token_id,
            text={
                **{k: getattr(text, k) for k in _TEXT_KEYS if hasattr(text, k)},
                "rope_parameters": getattr(text, "rope_parameters", None),
                "tokenizer_size": len(self.tokenizer),
            },
            observed=observed,
        )


def _tokenizer_state(tokenizer: Any) -> Any:
    """All that makes ids of a text; how it pads and cuts is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    state = json.loads(backend.to_str())
    return {k: v for k, v in state.items() if k not in ("padding", "truncation")}


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what depends on where it was loaded from."""
    unstable = ("_name_or_path", "transformers_version", "_commit_hash")
    return {k: v for k, v in config.items() if k not in unstable}


def short_hash(value: Any) -> str:
    """sha256 of a value as JSON, 16 hex digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
