"""The frozen target: a Hugging Face model with its processor or, text only, its tokenizer."""

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.capture.file_digest import sampled_digest
from dspark.capture.hub import offline_if_unreachable
from dspark.capture.settings import TargetOptions
from dspark.capture.targets.backbone import (
    check_decoder_only,
    decoder_layers,
    find_backbone,
    find_head,
)
from dspark.capture.targets.load_errors import why_not_loadable
from dspark.capture.targets.special_tokens import eos_token_ids, image_token_id, video_token_id
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
        model: in eval mode.
        processor: of the model; the tokenizer itself for a text-only target.
        backbone: the language backbone.
        device: where the model's inputs go.
    """

    id: str
    revision: str
    fingerprint: str
    model: Any
    processor: Any
    backbone: Any
    device: torch.device

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

    def config_hash(self) -> str:
        """sha256 of the model's config, 16 hex digits."""
        return _hash(_stable(self.model.config.to_dict()))

    def processor_hash(self) -> str:
        """sha256 of the processor's settings and of the whole tokenizer, 16 hex digits."""
        settings = _stable(self.processor.to_dict()) if self.takes_pictures else {}
        return _hash([settings, _tokenizer_state(self.tokenizer)])

    def chat_template_hash(self) -> str:
        """sha256 of the chat template, 16 hex digits."""
        return _hash(self.processor.chat_template)

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
            architecture=type(self.model).__name__,
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


def load_target(name: str, device: torch.device, options: TargetOptions | None = None) -> Target:
    """Load a model and its processor in the checkpoint's own number type, frozen.

    Args:
        name: a folder, or a Hugging Face id.
        device: where to put the model.
        options: how to load it; the defaults of ``TargetOptions`` without.

    Raises:
        InputError: not found, not loadable, or not a model that can be captured.
    """
    from transformers import AutoConfig, AutoProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = options or TargetOptions()
    is_folder = Path(name).is_dir()
    if not is_folder and not _looks_like_hub_id(name):
        raise InputError(f"--target {name}: no such folder")
    if is_folder and options.revision is not None:
        raise InputError(
            f"--revision {options.revision}: --target {name} is a folder, which has no revisions; "
            "leave --revision out"
        )
    source: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.revision is not None:
        source["revision"] = options.revision

    with nullcontext() if is_folder else offline_if_unreachable():
        config = _load(name, "config", AutoConfig.from_pretrained, **source)
        auto_model = _auto_model(name, config)
        try:
            check_decoder_only(config)
        except InputError as error:
            raise InputError(f"--target {name}: {error}") from None
        processor = _load(name, "processor", AutoProcessor.from_pretrained, **source)
        _check_processor(name, processor, config)
        _set_chat_template(name, processor, options.chat_template)

        how: dict[str, Any] = {"dtype": "auto", "output_loading_info": True}
        if options.attn_implementation is not None:
            how["attn_implementation"] = options.attn_implementation
        if options.device_map is not None:
            how["device_map"] = "cpu" if device.type == "cpu" else options.device_map
        model, loading = _load(name, "model", auto_model.from_pretrained, **source, **how)
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"--target {name}: its files lack {len(missing)} of its weights ({missing[0]}, …), "
            "which would be random numbers; download it again"
        )
    if options.device_map is None:
        model = model.to(device)
    model.eval().requires_grad_(False)
    try:
        backbone = find_backbone(model)
    except InputError as error:
        raise InputError(f"--target {name}: {error}") from None
    return Target(
        id=name,
        revision=getattr(model.config, "_commit_hash", None) or "",
        fingerprint=_weights_fingerprint(Path(name)) if is_folder else "",
        model=model,
        processor=processor,
        backbone=backbone,
        device=input_device(model),
    )


def _load(name: str, part: str, loader: Callable[..., Any], **how: Any) -> Any:
    try:
        return loader(name, **how)
    except Exception as error:  # what loaders and the code of repositories raise has no bound
        raise InputError(f"--target {name}: {why_not_loadable(part, error)}") from None


def _auto_model(name: str, config: Any) -> Any:
    """The class of transformers that builds this model with its language-model head."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    own_code = getattr(config, "auto_map", None) or {}
    for auto, known in (
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        if type(config) in known or auto.__name__ in own_code:
            return auto
    raise InputError(
        f"--target {name}: transformers builds no image-text-to-text and no causal language model "
        f"of model type {config.model_type!r}"
    )


def _check_processor(name: str, processor: Any, config: Any) -> None:
    from transformers import PreTrainedTokenizerBase

    if isinstance(processor, PreTrainedTokenizerBase):
        if getattr(config, "vision_config", None) is not None:
            raise InputError(
                f"--target {name}: it reads pictures, but brings only a tokenizer; put its "
                "processor's files (preprocessor_config.json, processor_config.json) beside it"
            )
    elif not hasattr(processor, "tokenizer"):
        raise InputError(f"--target {name}: its processor has no tokenizer; put one beside it")


def _set_chat_template(name: str, processor: Any, file: Path | None) -> None:
    """Make ``processor.chat_template`` the one text that is used, of several or of none."""
    template = processor.chat_template or getattr(
        getattr(processor, "tokenizer", None), "chat_template", None
    )
    if file is not None:
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"--chat-template {file}: not readable as text ({error})") from None
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise InputError(
            f"--target {name}: it has no chat template; give one with --chat-template FILE"
        )
    processor.chat_template = template


def input_device(model: Any) -> torch.device:
    """The embedding's device, also when accelerate keeps its weights elsewhere between calls."""
    embedding = model.get_input_embeddings()
    runs_on = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return torch.device(embedding.weight.device if runs_on is None else runs_on)


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def _weights_fingerprint(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    return _hash([[p.name, sampled_digest(p)] for p in files])


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


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
