"""Loading a target: its config, its processor and its weights, checked."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark.capture.file_digest import sampled_digest
from dspark.capture.hub import offline_if_unreachable
from dspark.capture.settings import TargetOptions
from dspark.capture.targets.backbone import check_decoder_only, find_backbone
from dspark.capture.targets.load_errors import why_not_loadable
from dspark.capture.targets.processor import TargetProcessor
from dspark.capture.targets.special_tokens import image_token_id
from dspark.capture.targets.splitting import fill, how_to_split, split_head_tensors
from dspark.capture.targets.target import Target, short_hash
from dspark.capture.workers.replica import Replica, reaching_peers
from dspark.schemas.errors import InputError


def load_processor(name: str, options: TargetOptions | None = None) -> TargetProcessor:
    """Load a model's config and its processor, but no weights.

    Args:
        name: a folder, or a Hugging Face id.
        options: how to load it; the defaults of ``TargetOptions`` without.

    Raises:
        InputError: not found, not loadable, or not of a model that can be captured.
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
    source = _source(options)
    with nullcontext() if is_folder else offline_if_unreachable():
        config = _load(name, "config", AutoConfig.from_pretrained, **source)
        _auto_model(name, config)
        try:
            check_decoder_only(config)
        except InputError as error:
            raise InputError(f"--target {name}: {error}") from None
        processor = _load(name, "processor", AutoProcessor.from_pretrained, **source)
        _check_processor(name, processor, config)
        _set_chat_template(name, processor, options.chat_template)
    takes_pictures = hasattr(processor, "tokenizer")
    image_id = image_token_id(config, processor) if takes_pictures else None
    return TargetProcessor(processor, config, image_id)


def load_target(
    name: str,
    device: torch.device,
    options: TargetOptions | None = None,
    replica: Replica | None = None,
    loaded: TargetProcessor | None = None,
) -> Target:
    """Load a model and its processor in the checkpoint's own number type, frozen.

    Args:
        name: a folder, or a Hugging Face id.
        device: where to put the model.
        options: how to load it; the defaults of ``TargetOptions`` without.
        replica: the connected workers to split it over, which all call this at the same time. The
            leader holds the whole model in host memory meanwhile; each keeps the input embedding
            and the head in host memory afterwards, beside its part on ``device``.
        loaded: what ``load_processor`` gave, if it was called before.

    Raises:
        InputError: not found, not loadable, or not a model that can be captured.
    """
    options = options or TargetOptions()
    loaded = loaded or load_processor(name, options)
    is_folder = Path(name).is_dir()
    auto_model = _auto_model(name, loaded.config)
    with nullcontext() if is_folder else offline_if_unreachable():
        how: dict[str, Any] = {
            "dtype": "auto",
            "output_loading_info": True,
            "use_safetensors": True,  # .bin files are pickle
            **_source(options),
        }
        if options.attn_implementation is not None:
            how["attn_implementation"] = options.attn_implementation
        if options.device_map is not None:
            how["device_map"] = "cpu" if device.type == "cpu" else options.device_map
        load = partial(_load, name, "model", auto_model.from_pretrained, **how)
        if replica is None:
            model = _complete(name, *load())
        else:
            trusted = options.trust_remote_code
            split = how_to_split(
                name, auto_model, loaded.config, replica, trust_remote_code=trusted
            )
            whole = _complete(name, *load()) if replica.is_leader else None
            model, _ = load(**split)
            fill(model, whole)
            del whole
    if options.device_map is None and replica is None:
        model = model.to(device)
    model.eval().requires_grad_(False)
    try:
        backbone = find_backbone(model)
    except InputError as error:
        raise InputError(f"--target {name}: {error}") from None
    device = input_device(model)
    return Target(
        id=name,
        revision=getattr(model.config, "_commit_hash", None) or "",
        fingerprint=_weights_fingerprint(Path(name)) if is_folder else "",
        model=model,
        processor=loaded.processor,
        backbone=backbone,
        device=device,
        gathered=None if replica is None else split_head_tensors(name, model, backbone, device),
    )


def _source(options: TargetOptions) -> dict[str, Any]:
    revision = {} if options.revision is None else {"revision": options.revision}
    return {"trust_remote_code": options.trust_remote_code, **revision}


def _load(name: str, part: str, loader: Callable[..., Any], **how: Any) -> Any:
    try:
        with reaching_peers():
            return loader(name, **how)
    except InputError:
        raise
    except Exception as error:  # what loaders and the code of repositories raise has no bound
        raise InputError(f"--target {name}: {why_not_loadable(part, error)}") from None


def _complete(name: str, model: Any, loading: dict[str, Any]) -> Any:
    """The model, if its files hold all of its weights."""
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"--target {name}: its files lack {len(missing)} of its weights ({missing[0]}, …), "
            "which would be random numbers; download it again"
        )
    return model


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
    files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    return short_hash([[p.name, sampled_digest(p)] for p in files])
