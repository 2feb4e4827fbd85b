"""Training starts from published drafts as they are, and from nothing that does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_cache import HIDDEN, LAYERS, VOCAB, write_cache
from torch import Tensor

from dspark.schemas.errors import InputError
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import Cache, open_cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.init_from import WarmStart
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.train import TrainResult, train_draft

# Two query heads of 12, one key head, MLP 20: not the target's.
QWEN = {
    "attention_bias": False,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
QWEN_LAYER = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (24, 16),
    "self_attn.k_proj.weight": (12, 16),
    "self_attn.v_proj.weight": (12, 16),
    "self_attn.o_proj.weight": (16, 24),
    "self_attn.q_norm.weight": (12,),
    "self_attn.k_norm.weight": (12,),
    "mlp.gate_proj.weight": (20, 16),
    "mlp.up_proj.weight": (20, 16),
    "mlp.down_proj.weight": (16, 20),
}
BLOCKS = {
    "fc.weight": (16, 32),
    "hidden_norm.weight": (16,),
    "norm.weight": (16,),
    **{f"layers.0.{name}": shape for name, shape in QWEN_LAYER.items()},
    **{f"layers.1.{name}": shape for name, shape in QWEN_LAYER.items()},
}
DFLASH_CONFIG = QWEN | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "dflash_config": {"mask_token_id": 46, "target_layer_ids": [1, 3]},
    "layer_types": ["full_attention", "full_attention"],
}
DSPARK_CONFIG = QWEN | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 3,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "gated",
    "markov_rank": 5,
    "mask_token_id": 46,
    "num_anchors": 512,
    "target_layer_ids": [1, 3],
}
DSPARK = {
    **BLOCKS,
    "markov_head.markov_w1.weight": (48, 5),
    "markov_head.markov_w2.weight": (48, 5),
    "markov_head.gate_proj.weight": (5, 21),
    "markov_head.gate_proj.bias": (5,),
    "confidence_head.proj.weight": (1, 21),
    "confidence_head.proj.bias": (1,),
}
TARGETS = {"embed_tokens.weight": (48, 16), "lm_head.weight": (48, 16)}
EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "bos_token_id": 1,
    "draft_vocab_size": 20,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": VOCAB,
}


def eagle3_shapes(layer: str) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (16, 48),
        "norm.weight": (16,),
        "lm_head.weight": (20, 16),
        f"{layer}.input_layernorm.weight": (16,),
        f"{layer}.hidden_norm.weight": (16,),
        f"{layer}.post_attention_layernorm.weight": (16,),
        f"{layer}.self_attn.q_proj.weight": (24, 32),
        f"{layer}.self_attn.k_proj.weight": (12, 32),
        f"{layer}.self_attn.v_proj.weight": (12, 32),
        f"{layer}.self_attn.o_proj.weight": (16, 24),
        f"{layer}.mlp.gate_proj.weight": (20, 16),
        f"{layer}.mlp.up_proj.weight": (20, 16),
        f"{layer}.mlp.down_proj.weight": (16, 20),
    }


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.2 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }


def eagle3_tensors(layer: str = "midlayer") -> dict[str, Tensor]:
    used = torch.arange(20) * 2
    return {
        **random_tensors(eagle3_shapes(layer)),
        "d2t": used - torch.arange(20),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, used, True),
    }


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "dflash": ("dflash", DFLASH_CONFIG, random_tensors(BLOCKS)),
    "dflash with the target's": ("dflash", DFLASH_CONFIG, random_tensors(BLOCKS | TARGETS)),
    "dspark": ("dspark", DSPARK_CONFIG, random_tensors(DSPARK | TARGETS)),
    "dspark without the target's": ("dspark", DSPARK_CONFIG, random_tensors(DSPARK)),
    "eagle3": ("eagle3", EAGLE3_CONFIG, eagle3_tensors()),
    "eagle3 as vLLM's": ("eagle3", EAGLE3_CONFIG, eagle3_tensors("layers.0")),
}


def publish(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], files: int = 1
) -> Path:
    """A checkpoint as found elsewhere, in so many files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {}
    for i in range(files):
        part = f"model-{i + 1:05}-of-{files:05}.safetensors"
        names = sorted(tensors)[i::files]
        save_file({name: tensors[name] for name in names}, folder / part)
        where |= dict.fromkeys(names, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(write_cache(tmp_path_factory.mktemp("init_from") / "cache"))


def start(cache: Cache, arch: str, folder: Path, **overrides: Any) -> WarmStart:
    return WarmStart(folder, draft_class(arch), cache.manifest, overrides)


def fit(cache: Cache, arch: str, out: Path, **options: Any) -> TrainResult:
    settings = {"steps": 2, "batch_size": 4, "eval_fraction": 0.2, "device": "cpu"}
    return train_draft(cache.root, arch, out, **(settings | {"progress": False} | options))


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("case", PUBLISHED)
def test_every_tensor_of_a_published_draft_arrives(
    cache: Cache, tmp_path: Path, case: str, files: int
) -> None:
    arch, config, tensors = PUBLISHED[case]
    warm = start(cache, arch, publish(tmp_path / "published", config, tensors, files))
    cls, head = draft_class(arch), TargetHead.load(cache.root)
    draft = cls(warm.config)
    draft.attach_head(head)
    warm.load_into(draft)

    state = draft.state_dict()
    trained = state.keys() - {f"{module}.weight" for module in cls.frozen}
    for name in trained:
        theirs = tensors.get(name)
        if theirs is None:
            theirs = tensors[name.replace("midlayer", "layers.0")]
        assert torch.equal(state[name], theirs.to(state[name].dtype)), name
    assert len(trained) == len(tensors.keys() - (TARGETS.keys() - trained))
    for module in cls.frozen:
        assert not draft.get_submodule(module).weight.requires_grad
    if arch == "dspark":
        assert torch.equal(draft.lm_head.weight, head.weight)
        assert torch.equal(draft.embed_tokens.weight, head.embeddings)
    assert draft.config.rope_parameters["rope_theta"] == config["rope_theta"]
    assert draft.config.head_dim == 12


@pytest.mark.parametrize("case", ["dflash", "dspark", "eagle3"])
def test_a_training_starts_from_it(cache: Cache, tmp_path: Path, case: str) -> None:
    arch, config, tensors = PUBLISHED[case]
    folder = publish(tmp_path / "published", config, tensors)
    out = tmp_path / "out"
    random_state = torch.get_rng_state()
    fit(cache, arch, out, init_from=folder, steps=1, lr=1e-9)
    assert torch.equal(torch.get_rng_state(), random_state)
    saved = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if name in saved and name not in TARGETS:
            torch.testing.assert_close(saved[name], tensor.to(saved[name].dtype), atol=1e-8, rtol=0)
    written = json.loads((out / "config.json").read_text())
    assert written["dtype"] == "float32" and "auto_map" not in written
    for name in ("architectures", "rope_theta", "block_size", "dflash_config", "markov_rank"):
        if name in config and not (name == "dflash_config" and arch == "dspark"):
            assert written[name] == config[name]


@pytest.mark.parametrize("arch", ["msd", "dspark", "dflash", "eagle3", "eagle", "medusa"])
def test_a_draft_of_this_project_goes_on_where_it_stopped(
    cache: Cache, tmp_path: Path, arch: str
) -> None:
    small = {"msd": {}, "eagle": {}, "medusa": {"num_heads": 2}, "eagle3": {"draft_vocab_size": 30}}
    config = small.get(arch, {"num_hidden_layers": 1, "block_size": 3})
    first = fit(cache, arch, tmp_path / "first", draft_config=config, lr=1e-2)
    second = fit(cache, arch, tmp_path / "second", init_from=tmp_path / "first", lr=1e-2)
    assert second.before is not None
    assert second.before["tau"] == first.after["tau"]
    assert second.before["acceptance"] == first.after["acceptance"]
    assert second.after["tau"] != first.after["tau"]


def test_entries_that_keep_the_network_may_be_set(cache: Cache, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", *PUBLISHED["dflash"][1:])
    config = start(cache, "dflash", folder, block_size="8", distill_weight="0.5").config
    assert (config.block_size, config.gamma, config.distill_weight) == (8, 4, 0.5)
    assert config.mask_token_id == 46 and config.target_layer_ids == [1, 3]
    with pytest.raises(InputError, match="-c blocksize: draft 'dflash' has no such config entry"):
        start(cache, "dflash", folder, blocksize="8")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"markov_rank": 7},
            r"markov_rank=7: .*another network.*markov_w1.weight is \[48, 5\] and",
        ),
        ({"markov_head_type": "rnn"}, "another network.*missing markov_head.joint_proj.bias"),
        ({"enable_confidence_head": "false"}, "another network.*unknown confidence_head.proj.bias"),
        ({"num_hidden_layers": 4}, r"another network.*missing layers\.2.*and \d+ more"),
        ({"target_layer_ids": "[1]"}, r"another network.*fc.weight is \[16, 32\] and not \[16, 16"),
        ({"head_dim": 12}, "-c head_dim: --init-from .* decides it"),
        ({"rope_theta": 5}, "-c rope_theta: --init-from .* decides it"),
    ],
)
def test_entries_that_change_the_network_are_refused(
    cache: Cache, tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    folder = publish(tmp_path / "published", *PUBLISHED["dspark"][1:])
    with pytest.raises(InputError, match=message) as error:
        start(cache, "dspark", folder, **entry)
    assert "\n" not in str(error.value)


def test_what_the_file_leaves_open_is_a_fresh_drafts(cache: Cache, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", *PUBLISHED["eagle3"][1:])
    config = start(cache, "eagle3", folder).config
    fresh = draft_class("eagle3").config_from_cache(cache.manifest, {})
    assert config.target_layer_ids == fresh.target_layer_ids is not None
    assert config.image_token_id == VOCAB - 1
    assert (config.draft_vocab_size, config.eos_token_id) == (20, 2)
    without = {k: v for k, v in DFLASH_CONFIG.items() if k != "num_target_layers"}
    folder = publish(tmp_path / "newer", without, PUBLISHED["dflash"][2])
    assert start(cache, "dflash", folder).config.num_target_layers == LAYERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "made for another target: its hidden_size is 32, the cache's 16"),
        ({"vocab_size": 50}, "made for another target: its vocab_size is 50, the cache's 48"),
        ({"num_target_layers": 36}, "its num_target_layers is 36, the cache's 6"),
        ({"mask_token_id": 48}, "mask_token_id=48: must be an id of the target's vocabulary"),
        ({"target_layer_ids": [1, 5]}, "6 decoder layers; name some of -1"),
        ({"architectures": ["DFlashDraftModel"]}, "--arch dspark starts from Qwen3DSparkModel"),
        ({"architectures": None}, "architectures is None"),
        ({"sample_from_anchor": False}, "sample_from_anchor=false"),
        ({"num_hidden_layers": "two"}, "config.json is not usable"),
        ({"num_attention_heads": 4}, r"q_proj.weight is \[24, 16\] and not \[48, 16\]"),
    ],
)
def test_a_draft_of_something_else_is_refused(
    cache: Cache, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = publish(tmp_path / "published", DSPARK_CONFIG | changes, PUBLISHED["dspark"][2])
    with pytest.raises(InputError, match=message) as error:
        start(cache, "dspark", folder)
    assert "\n" not in str(error.value)


def test_modules_that_an_entry_adds_are_new(cache: Cache, tmp_path: Path) -> None:
    """The second stage of ViSpec: said with ``-c stage=2``, and only so."""
    fit(cache, "vispec", tmp_path / "one", draft_config={"stage": 1}, lr=1e-2)
    assert start(cache, "vispec", tmp_path / "one").config.stage == 1
    config = {"stage": 2}
    two = fit(cache, "vispec", tmp_path / "two", init_from=tmp_path / "one", draft_config=config)
    assert two.before is not None
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    new = second.keys() - first.keys()
    assert new and {name.split(".")[0] for name in new} == {"imadpt", "img_fc"}
    with pytest.raises(InputError, match="stage=1: that is another network"):
        start(cache, "vispec", tmp_path / "two", stage=1)
    save_file(first, tmp_path / "two" / "model.safetensors")
    with pytest.raises(InputError, match="missing imadpt"):
        start(cache, "vispec", tmp_path / "two")


def test_names_shapes_and_types_that_do_not_fit_are_all_listed(
    cache: Cache, tmp_path: Path
) -> None:
    tensors = dict(PUBLISHED["dflash"][2])
    del tensors["norm.weight"]
    tensors["mask_embedding"] = torch.zeros(16)
    tensors["fc.weight"] = torch.zeros(16, 48)
    tensors["layers.0.mlp.up_proj.weight"] = torch.zeros(20, 16, dtype=torch.int8)
    folder = publish(tmp_path / "published", DFLASH_CONFIG, tensors)
    with pytest.raises(InputError) as error:
        fit(cache, "dflash", tmp_path / "out", init_from=folder)
    assert str(error.value) == (
        f"--init-from {folder}: not the tensors of this draft: fc.weight is [16, 48] and not "
        "[16, 32]; layers.0.mlp.up_proj.weight is of type I8; missing norm.weight; unknown "
        "mask_embedding"
    )
    assert not (tmp_path / "out").exists()


def test_a_tensor_under_two_names_is_refused(cache: Cache, tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    tensors["layers.0.hidden_norm.weight"] = torch.zeros(16)
    folder = publish(tmp_path / "published", EAGLE3_CONFIG, tensors)
    with pytest.raises(InputError, match="holds midlayer.hidden_norm.weight a second time"):
        start(cache, "eagle3", folder)


def test_pickled_weights_are_never_opened(cache: Cache, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", *PUBLISHED["dflash"][1:])
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickled \(pytorch_model.bin\), which can run code"):
        start(cache, "dflash", folder)


def test_damaged_files_are_named(cache: Cache, tmp_path: Path) -> None:
    def folder(name: str, **files: bytes | None) -> Path:
        made = publish(tmp_path / name, *PUBLISHED["dflash"][1:], files=2)
        for file, data in files.items():
            (path,) = made.glob(f"{file}*")
            path.unlink() if data is None else path.write_bytes(data)
        return made

    elsewhere = json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}).encode()
    cases = [
        (tmp_path / "nowhere", "there is no config.json"),
        (folder("a", config=None), "there is no config.json"),
        (folder("b", config=b"{"), "config.json is not usable"),
        (folder("c", config=b"[1]"), "config.json is not usable"),
        (folder("d", **{"model.safetensors.index": None}), "there is no model.safetensors, nor"),
        (folder("e", **{"model.safetensors.index": b"{}"}), "index.json is not usable"),
        (folder("f", **{"model.safetensors.index": elsewhere}), "names files of other folders"),
        (folder("g", **{"model-00002": None}), "there is no model-00002-of-00002.safetensors"),
        (folder("h", **{"model-00002": b"x" * 99}), "model-00002-of-00002.safetensors: not readab"),
    ]
    for where, message in cases:
        with pytest.raises(InputError, match=message) as error:
            start(cache, "dflash", where)
        assert "\n" not in str(error.value)


def test_a_warm_training_resumes_as_if_never_stopped(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.train_from_cache import loop

    folder = publish(tmp_path / "published", *PUBLISHED["eagle3"][1:])
    options = {"init_from": folder, "steps": 4, "save_every": 1, "lr": 1e-2}
    whole = fit(cache, "eagle3", tmp_path / "whole", **options)

    def stop(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == 2:
            raise KeyboardInterrupt
        return real(seed, step, batch)

    real = loop.step_random
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "step_random", stop)
        fit(cache, "eagle3", tmp_path / "out", **options)
    with pytest.raises(InputError, match="--init-from: .* there, not given now"):
        fit(cache, "eagle3", tmp_path / "out", **(options | {"init_from": None}), resume=True)
    resumed = fit(cache, "eagle3", tmp_path / "out", **options, resume=True)
    assert resumed.after == whole.after
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
