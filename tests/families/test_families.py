"""What is captured of each family is what its model computes, bit for bit, with inputs made by
hand. The oracles see no hook: a layer's forward is wrapped, embeddings and picture features are
asked from the model's own methods, the rest is in the model's output."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_models import (
    ADDED_BETWEEN_LAYERS,
    BENT_LOGITS,
    CHANGED_INSIDE,
    FAMILIES,
    STREAMS,
    make_inputs,
    make_model,
)
from tiny_targets import IMAGE
from torch import Tensor
from transformers import PreTrainedModel

from dspark.capture.targets.backbone import find_backbone
from dspark.capture.targets.backbone_input import layer_input
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.picture_entry import where_pictures_enter
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError

CAPTURED = (-1, 0, 1, 2)


def target_of(model: PreTrainedModel) -> Target:
    processor = SimpleNamespace(tokenizer=None, image_token_id=IMAGE)
    return Target("tiny", "", "", model, processor, find_backbone(model), torch.device("cpu"))


def captured(target: Target, inputs: dict[str, Tensor], lengths: list[int]) -> Features:
    return capture_features(
        target, inputs, lengths, layers=CAPTURED, dtype=torch.float32, with_logits=True
    )


class Wrapped:
    """Notes what a module's forward is called with, by replacing that method."""

    def __init__(self, module: Any) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.module, self.forward = module, module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((tuple(a.clone() if torch.is_tensor(a) else a for a in args), kwargs))
        return self.forward(*args, **kwargs)

    def undo(self) -> None:
        self.module.forward = self.forward


def only_stream(family: str, hidden: Tensor) -> Tensor:
    """The mean over streams, by an explicit sum."""
    if family not in STREAMS:
        return hidden
    axis, count = STREAMS[family]
    width = hidden.shape[-1] // count
    parts = (
        [hidden[..., i * width : (i + 1) * width] for i in range(count)]
        if axis == -1
        else list(hidden.unbind(axis))
    )
    return torch.stack(parts, 0).mean(0)


def expected_embeddings(
    family: str, model: PreTrainedModel, inputs: dict[str, Tensor], real: Tensor
) -> Tensor:
    """Text by the input embedding, pictures by ``get_image_features``."""
    ids = inputs["input_ids"]
    embeds = model.get_input_embeddings()(ids.masked_fill(ids == IMAGE, 0)).clone()
    if family == "granite4_vision":  # pictures enter between the layers only
        embeds[ids == IMAGE] = 0
        return embeds[real]
    keys = set(inputs) - {"input_ids", "attention_mask", FAMILIES[family].types}
    features = model.base_model.get_image_features(**{k: inputs[k] for k in keys}, return_dict=True)
    pooled = features.pooler_output
    rows = pooled if isinstance(pooled, Tensor) else torch.cat(list(pooled))
    embeds[ids == IMAGE] = rows.reshape(-1, embeds.shape[-1])
    return embeds[real]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_captured_equals_the_models_own(family: str) -> None:
    model = make_model(family)
    inputs, lengths = make_inputs(family)
    target = target_of(model)
    got = captured(target, inputs, lengths)

    real = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, length in enumerate(lengths):
        real[row, :length] = True
    layers = [Wrapped(layer) for layer in target.backbone.layers]
    backbone = Wrapped(target.backbone)
    output = model(**inputs, use_cache=False)
    for wrapped in (*layers, backbone):
        wrapped.undo()

    embeds = expected_embeddings(family, model, inputs, real)
    assert torch.equal(got.stored["inputs_embeds"], embeds)
    last = model.base_model(**inputs, use_cache=False).last_hidden_state[real]
    assert torch.equal(got.stored["last_hidden_state"], last)
    assert got.logits is not None
    assert torch.equal(got.logits, output.logits[real])
    for k in CAPTURED:
        args, kwargs = layers[k + 1].calls[0]
        hidden = args[0] if args else kwargs["hidden_states"]
        expected = only_stream(family, hidden)[real]
        assert torch.equal(got.stored[f"hidden_states.{k}"], expected), k
    assert set(got.streams.values()) == ({STREAMS[family][1]} if family in STREAMS else set())

    if family not in STREAMS:
        own = model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        assert torch.equal(own[-1][real], last)
        assert torch.equal(own[0][real], embeds) == (family not in CHANGED_INSIDE)
        for k in CAPTURED[1:]:
            same = torch.equal(own[k + 1][real], got.stored[f"hidden_states.{k}"])
            assert same or family in ADDED_BETWEEN_LAYERS, k
        if family in ADDED_BETWEEN_LAYERS:
            assert not torch.equal(own[1][real], got.stored["hidden_states.0"])

    positions = backbone.calls[0][1].get("position_ids")
    if positions is None:
        positions = torch.arange(real.shape[1])
    rows = positions.reshape(-1, *real.shape) if positions.ndim == 3 else positions.expand_as(real)
    rows = rows if rows.ndim == 3 else rows[None]
    assert torch.equal(got.position_ids, rows[:, real].int())
    check_pictures(family, target, inputs, lengths, got)
    check_head(family, target, got)


def check_pictures(
    family: str, target: Target, inputs: dict[str, Tensor], lengths: list[int], got: Features
) -> None:
    """Another picture changes what the backbone receives at picture positions, and the rest."""
    pixels = inputs["pixel_values"]
    other = captured(target, {**inputs, "pixel_values": pixels.flip(-1) * 0.5}, lengths)
    ids = torch.cat([row[:n] for row, n in zip(inputs["input_ids"], lengths, strict=True)])
    where = where_pictures_enter(target, ids, got, other)
    assert where == ("side_inputs" if family == "granite4_vision" else "inputs_embeds")
    assert (where == "inputs_embeds") == bool(got.stored["inputs_embeds"][ids == IMAGE].any())
    wrong = replace(target, model=SimpleNamespace(config=SimpleNamespace(image_token_id=7)))
    if where == "inputs_embeds":
        with pytest.raises(InputError, match="tokens other than its image token"):
            where_pictures_enter(wrong, ids, got, other)
    with pytest.raises(InputError, match="do not depend on the picture"):
        where_pictures_enter(target, ids, got, got)


def check_head(family: str, target: Target, got: Features) -> None:
    if family in BENT_LOGITS:
        with pytest.raises(InputError, match="use --logits full or --logits topk:64"):
            prove_head(target, got)
    else:
        assert prove_head(target, got) < 1e-5


@pytest.mark.parametrize(
    ("family", "side", "source"),
    [
        ("qwen3_vl", ["deepstack_visual_embeds", "visual_pos_masks"], "argument"),
        ("gemma4", ["per_layer_inputs"], "argument"),
        ("granite4_vision", ["deepstack_features", "vision_mask"], "argument"),
        ("llava", [], "argument"),
        ("chameleon", ["pixel_values"], "layer_0"),
    ],
)
def test_what_else_enters_the_backbone(family: str, side: list[str], source: str) -> None:
    got = captured(target_of(make_model(family)), *make_inputs(family))
    assert got.side_inputs == side
    assert got.embeds_source == source


def test_position_rows() -> None:
    rows = {"qwen2_5_vl": 3, "hunyuan_vl": 4, "llava": 1}
    for family, count in rows.items():
        got = captured(target_of(make_model(family)), *make_inputs(family))
        assert got.position_ids.shape[0] == count, family


def test_mrope_positions_against_the_rope_index_function() -> None:
    model = make_model("qwen2_5_vl")
    inputs, lengths = make_inputs("qwen2_5_vl")
    got = captured(target_of(model), inputs, lengths)
    expected, _ = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    rows = [expected[:, b, :n] for b, n in enumerate(lengths)]
    assert torch.equal(got.position_ids, torch.cat(rows, 1).int())


@pytest.mark.parametrize("drop", ["mm_token_type_ids", "pixel_values"])
def test_every_key_of_the_processor_matters(drop: str) -> None:
    """Qwen2.5-VL goes on silently without either of them, with other features."""
    target = target_of(make_model("qwen2_5_vl"))
    inputs, lengths = make_inputs("qwen2_5_vl")
    whole = captured(target, inputs, lengths)
    less = captured(target, {k: v for k, v in inputs.items() if k != drop}, lengths)
    assert not torch.equal(whole.last_hidden, less.last_hidden)


def test_stored_type_is_a_cast_of_the_models_own() -> None:
    target = target_of(make_model("glm5_next"))
    inputs, lengths = make_inputs("glm5_next")
    whole = captured(target, inputs, lengths)
    half = capture_features(
        target, inputs, lengths, layers=CAPTURED, dtype=torch.bfloat16, with_logits=False
    )
    assert half.logits is None
    for name, stored in half.stored.items():
        assert torch.equal(stored, whole.stored[name].bfloat16()), name


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "chameleon"])
def test_a_value_changed_in_place_later_was_copied_before(family: str) -> None:
    """Some models add to the residual stream in place; what was captured must not follow."""
    model = make_model(family)
    inputs, lengths = make_inputs(family)
    target = target_of(model)
    before = captured(target, inputs, lengths)

    def spoil(_: Any, __: Any, output: Any) -> None:
        for seen in noted:
            seen.add_(1)

    noted: list[Tensor] = []
    layer = target.backbone.layers[0]
    layer.register_forward_pre_hook(lambda _m, args: noted.append(args[0]))
    target.backbone.register_forward_hook(spoil)
    after = captured(target, inputs, lengths)
    assert noted
    assert torch.equal(after.stored["inputs_embeds"], before.stored["inputs_embeds"])
    assert torch.equal(after.stored["hidden_states.-1"], before.stored["hidden_states.-1"])


def test_a_backbone_that_runs_twice_is_refused() -> None:
    model = make_model("llava")
    target = target_of(model)
    forward = model.forward
    model.forward = lambda **kw: (forward(**kw), forward(**kw))[1]
    with pytest.raises(InputError, match="ran 2 times in one forward pass"):
        captured(target, *make_inputs("llava"))


def test_a_layer_that_runs_twice_is_refused_unless_left_out() -> None:
    model = make_model("llava")
    target = target_of(model)
    target.backbone.layers[2] = target.backbone.layers[1]
    inputs, lengths = make_inputs("llava")
    with pytest.raises(InputError, match=r"hidden_states\.0 ran 2 times .* --layers none"):
        captured(target, inputs, lengths)
    none = capture_features(
        target, inputs, lengths, layers=[], dtype=torch.float32, with_logits=False
    )
    assert set(none.stored) == {"inputs_embeds", "last_hidden_state"}


def test_layers_of_an_unknown_shape_are_refused() -> None:
    model = make_model("llava")
    target = target_of(model)
    first = target.backbone.layers[0]
    forward = first.forward
    first.forward = lambda hidden, **kw: forward(hidden, **kw)[..., :20]
    target.backbone.layers[1].forward = lambda hidden, **kw: torch.cat(
        [hidden, hidden[..., :12]], -1
    )
    with pytest.raises(InputError, match=r"receives \[2, 27, 20\] .* --layers none"):
        captured(target, *make_inputs("llava"))


def test_the_residual_stream_is_the_first_argument_whatever_its_name() -> None:
    class Layer(torch.nn.Module):
        def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
            return stream * mask

    a, b = torch.randn(2), torch.randn(2)
    assert layer_input(Layer(), (a, b), {}) is a
    assert layer_input(Layer(), (), {"mask": b, "stream": a}) is a
    assert layer_input(Layer(), (), {"mask": b, "hidden_states": a}) is a
