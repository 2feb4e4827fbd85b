"""What cannot be captured faithfully is refused in one sentence, before anything is written."""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversation_data import mixed_rows, write_rows
from family_checkpoints import save_checkpoint
from family_models import make_inputs, make_model
from safetensors.torch import load_file, save_file
from tiny_targets import chat_template, tokenizer

import dspark
from dspark.capture.settings import TargetOptions
from dspark.capture.targets.backbone import find_backbone
from dspark.capture.targets.features import capture_features
from dspark.capture.targets.load_errors import why_not_loadable
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.special_tokens import image_token_id
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError

CPU = torch.device("cpu")


def refusal(target: Path | str, options: TargetOptions | None = None) -> str:
    with pytest.raises(InputError) as error:
        load_target(str(target), CPU, options)
    assert "\n" not in str(error.value)
    return str(error.value)


def capture_refusal(target: Path, tmp_path: Path, **options: Any) -> str:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    with pytest.raises(InputError) as error:
        dspark.capture(1, target=str(target), data=str(data), out=str(tmp_path / "c"), **options)
    assert not (tmp_path / "c").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_cross_attention() -> None:
    model = make_model("mllama")
    processor = SimpleNamespace(tokenizer=None)
    target = Target("tiny", "", "", model, processor, find_backbone(model), CPU)
    inputs, lengths = make_inputs("mllama")
    with pytest.raises(InputError, match=r"through cross attention \(cross_attention_states\)"):
        capture_features(target, inputs, lengths, layers=[], dtype=torch.float32, with_logits=False)


def test_encoder_decoder(tmp_path: Path) -> None:
    model = make_model("florence2")
    words = "florence2 is an encoder-decoder model"
    with pytest.raises(InputError, match=words):
        find_backbone(model)
    model.config.save_pretrained(tmp_path)  # no weights: it is refused before they are read
    assert words in refusal(tmp_path)


def test_not_found(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").endswith("none: no such folder")
    (tmp_path / "empty").mkdir()
    assert "its config cannot be loaded" in refusal(tmp_path / "empty")
    # Tests run offline, so a name of the Hub is one that cannot be reached.
    assert "the Hub cannot be reached" in refusal("nobody/nothing")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("You are trying to access a gated repo.\nMake sure", "log in with 'hf auth login'"),
        ("x is not a local folder and is not a valid model identifier\nIf", "check its spelling"),
        ("main2 is not a valid git identifier (branch name", "no such --revision"),
        ("The repository x contains custom code which must be executed", "--trust-remote-code"),
        ("XVideoProcessor requires the Torchvision library", "'pip install torchvision'"),
        ("FlashAttention2 has been toggled on, but flash_attn is not", "--attn-implementation"),
        ("\nThe first line.\nThe second.", "its processor cannot be loaded (The first line.)"),
    ],
)
def test_sentences_for_what_loaders_raise(raised: str, words: str) -> None:
    sentence = why_not_loadable("processor", OSError(raised))
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["processor_class"] = "PixtralProcessor"
    (folder / "processor_config.json").write_text(json.dumps(settings))
    assert refusal(folder).endswith("e.g. 'pip install torchvision'")


def test_a_model_type_that_transformers_builds_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    sentence = refusal(tmp_path)
    assert "no image-text-to-text and no causal language model" in sentence
    (tmp_path / "config.json").write_text('{"model_type": "nothing_known"}')
    assert "its config cannot be loaded" in refusal(tmp_path)


def test_pictures_but_only_a_tokenizer(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    (folder / "processor_config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("processor_class", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sentence = refusal(folder)
    assert "brings only a tokenizer" in sentence or "processor cannot be loaded" in sentence


def test_templates(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    assert "no chat template; give one with --chat-template FILE" in refusal(folder)
    missing = TargetOptions(chat_template=tmp_path / "none.jinja")
    assert "--chat-template" in refusal(folder, missing)

    blind = tmp_path / "blind.jinja"
    blind.write_text(template.replace("<|image_pad|>", "(picture)"))
    sentence = capture_refusal(folder, tmp_path, chat_template=str(blind))
    assert "do not render a conversation with a picture" in sentence

    given = tmp_path / "given.jinja"
    given.write_text(template)
    target = load_target(str(folder), CPU, TargetOptions(chat_template=given))
    assert target.processor.chat_template == template
    other = tmp_path / "other.jinja"
    other.write_text(template + " ")
    changed = load_target(str(folder), CPU, TargetOptions(chat_template=other))
    assert changed.chat_template_hash() != target.chat_template_hash()


def test_image_positions_not_found(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    config["image_token_index"] = 250  # a byte that no text has
    (folder / "config.json").write_text(json.dumps(config))
    assert "holds no picture positions (image token id 250)" in capture_refusal(folder, tmp_path)


def test_a_template_from_a_file_travels_with_the_cache(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    template = (folder / "chat_template.jinja").read_text()
    file = tmp_path / "mine.jinja"
    file.write_text("{# mine #}" + template)
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    dspark.capture(
        1,
        target=str(folder),
        data=str(data),
        out=str(tmp_path / "c"),
        chat_template=str(file),
    )
    stored = (tmp_path / "c" / "target" / "chat_template.jinja").read_text()
    assert stored == file.read_text()


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    assert "--revision main" in refusal(folder, TargetOptions(revision="main"))
    odd = TargetOptions(attn_implementation="no_such_attention")
    assert "no_such_attention" in refusal(folder, odd)


def test_a_forward_pass_that_fails(tmp_path: Path) -> None:
    """Some releases of transformers have models whose forward pass always raises."""
    folder = save_checkpoint("llava_next", tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    config["vision_feature_layer"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    assert "its forward pass fails on one small conversation" in capture_refusal(folder, tmp_path)


def test_a_forward_pass_that_fails_on_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint("llava_next", tmp_path / "t")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    for raised, words in (
        (
            RuntimeError("shapes differ\nSee above."),
            r"d\.parquet, rows 0, 1 \(RuntimeError: shapes differ\)",
        ),
        (torch.OutOfMemoryError("CUDA"), "--batch-tokens 16384: a batch of that size does not fit"),
    ):

        def fails(*_: Any, error: Exception = raised, **__: Any) -> None:
            raise error

        monkeypatch.setattr("dspark.capture.batch.capture_features", fails)
        with pytest.raises(InputError, match=words):
            dspark.capture(1, target=str(folder), data=str(data), out=str(tmp_path / "c"))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_are_missing_damaged_or_of_another_shape(tmp_path: Path) -> None:
    """transformers fills what is missing with random numbers."""
    folder = save_checkpoint("llava_next", tmp_path / "t")
    names = list(load_file(folder / "model.safetensors"))
    lost = next(name for name in names if "layers.1.mlp" in name)
    table = next(name for name in names if name.endswith("embed_tokens.weight"))
    _rewrite(folder, lambda weights: weights[table].fill_(float("nan")))
    assert "features are not all finite numbers of type bfloat16" in capture_refusal(
        folder, tmp_path
    )
    _rewrite(folder, lambda weights: weights.update({lost: weights[lost][:-1].clone()}))
    assert "its weights have other shapes than its config.json says" in refusal(folder)
    _rewrite(folder, lambda weights: weights.pop(lost))
    assert "its files lack 1 of its weights (" in refusal(folder)


def test_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    def unreachable() -> Any:
        asked.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.get_session", unreachable)
    assert "the Hub cannot be reached" in refusal("nobody/nothing")
    assert asked == [False]
    assert not constants.HF_HUB_OFFLINE


def test_head_that_cannot_be_proved_names_the_alternatives(tmp_path: Path) -> None:
    folder = save_checkpoint("granite4_vision", tmp_path / "t")
    sentence = capture_refusal(folder, tmp_path, logits="auto", layers="none")
    assert "use --logits full or --logits topk:64" in sentence


def test_image_tokens_by_config_or_processor() -> None:
    def owner(**ids: Any) -> Any:
        return SimpleNamespace(**ids)

    assert image_token_id(owner(image_token_id=5)) == 5
    assert image_token_id(owner(image_token_id=None, image_token_index=6)) == 6
    assert image_token_id(owner(image_patch_id=7)) == 7
    assert image_token_id(owner(image_token_index=-200), owner(image_token_id=8)) == 8
    assert image_token_id(owner(), owner(tokenizer=owner(image_token_id=9))) == 9
    assert image_token_id(owner(image_token_id=True)) is None


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class MyConfig(LlamaConfig):
    model_type = "my_own"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


def test_own_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_family_checkpoints import tiny_text_model

    folder = tmp_path / "t"
    tiny_text_model("llama").save_pretrained(folder)
    made = tokenizer()
    made.chat_template = chat_template("")
    made.save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "my_own",
        "auto_map": {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder).endswith("give --trust-remote-code if you trust that code")

    monkeypatch.setattr(sys, "path", [*sys.path])  # which transformers extends
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    target = load_target(str(folder), CPU, TargetOptions(trust_remote_code=True))
    assert type(target.model).__name__ == "MyModel"
    assert not target.takes_pictures


def test_pickled_weights(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    target = shutil.copytree(tiny_target("qwen2_5_vl"), tmp_path / "t")
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert "pickle files (.bin) are not read" in refusal(target)
