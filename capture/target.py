"""The frozen target: a Hugging Face vision-language model with its processor."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.capture.backbone import find_backbone, image_token_id, video_token_id
from dspark.capture.conversation_file import sampled_digest
from dspark.capture.settings import TargetOptions
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import TargetFacts

_WEIGHT_SUFFIXES = (".safetensors", ".bin")
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
        model: in eval mode on ``device``.
        processor: of the model.
        backbone: the language backbone.
        device: where the model lies.
    """

    id: str
    revision: str
    fingerprint: str
    model: Any
    processor: Any
    backbone: Any
    device: torch.device

    @property
    def num_layers(self) -> int:
        return len(self.backbone.layers)

    @property
    def text_config(self) -> Any:
        """The config of the language part."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def image_token_id(self) -> int | None:
        return image_token_id(self.model.config)

    @property
    def head(self) -> nn.Module | None:
        """The language-model head, or None where the model names none."""
        head: nn.Module | None = self.model.get_output_embeddings()
        return head

    def config_hash(self) -> str:
        """sha256 of the model's config, 16 hex digits."""
        return _hash(_stable(self.model.config.to_dict()))

    def processor_hash(self) -> str:
        """sha256 of the processor's settings and vocabulary, 16 hex digits."""
        settings = _stable(self.processor.to_dict())
        return _hash([settings, sorted(self.processor.tokenizer.get_vocab().items())])

    def chat_template_hash(self) -> str:
        """sha256 of the chat template, 16 hex digits."""
        return _hash(self.processor.chat_template)

    def facts(self, hidden_size: int, vocab_size: int) -> TargetFacts:
        """What the manifest says of the target, its widths H and V being as observed."""
        config = self.model.config
        text = self.text_config
        tokenizer = self.processor.tokenizer
        return TargetFacts(
            id=self.id,
            revision=self.revision,
            architecture=type(self.model).__name__,
            model_type=config.model_type,
            text_model_type=text.model_type,
            num_layers=self.num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            embedding_rows=self.model.get_input_embeddings().weight.shape[0],
            image_token_id=self.image_token_id,
            video_token_id=video_token_id(config),
            eos_token_ids=_eos_ids(self.model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            text={
                **{k: getattr(text, k) for k in _TEXT_KEYS if hasattr(text, k)},
                "rope_parameters": getattr(text, "rope_parameters", None),
                "tokenizer_size": len(tokenizer),
            },
        )


def load_target(name: str, device: torch.device, options: TargetOptions | None = None) -> Target:
    """Load a model and its processor in the checkpoint's own number type, frozen.

    Args:
        name: a folder, or a Hugging Face id.
        device: where to put the model.
        options: how to load it; the defaults of ``TargetOptions`` without.

    Raises:
        InputError: not found, not loadable, or not a model that can be captured.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if os.path.sep in name and not Path(name).is_dir() and not _looks_like_hub_id(name):
        raise InputError(f"--target {name}: no such folder")
    try:
        processor = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise InputError(f"--target {name}: {_why_no_processor(error)}") from None
    if not hasattr(processor, "tokenizer"):
        raise InputError(f"--target {name}: it has no processor for pictures and text")
    if not isinstance(processor.chat_template, str):
        raise InputError(f"--target {name}: its processor has no chat template")
    if "generation" not in processor.chat_template:
        raise InputError(
            f"--target {name}: its chat template does not mark what the assistant writes; put "
            "{% generation %} … {% endgeneration %} around the assistant's text and end token in "
            "its chat_template.jinja"
        )
    try:
        model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto")
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise InputError(
            f"--target {name}: the model cannot be loaded ({_first_line(error)})"
        ) from None
    model = model.to(device).eval().requires_grad_(False)
    return Target(
        id=name,
        revision=getattr(model.config, "_commit_hash", None) or "",
        fingerprint=_weights_fingerprint(Path(name)) if Path(name).is_dir() else "",
        model=model,
        processor=processor,
        backbone=find_backbone(model),
        device=device,
    )


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _why_no_processor(error: Exception) -> str:
    text = str(error)
    if "torchvision" in text.lower() or "video processor" in text.lower():
        return (
            "its processor needs torchvision; install the build that fits this torch, e.g. "
            "'pip install torchvision'"
        )
    return f"its processor cannot be loaded ({_first_line(error)})"


def _weights_fingerprint(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    return _hash([[p.name, sampled_digest(p)] for p in files])


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what depends on where it was loaded from."""
    unstable = ("_name_or_path", "transformers_version", "_commit_hash")
    return {k: v for k, v in config.items() if k not in unstable}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a turn, by the generation config or the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})
