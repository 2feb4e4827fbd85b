"""Which workers share a target, and what is said when they cannot."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dspark
from dspark.capture.targets.fully_sharded import (
    check_units,
    original_class,
    sharding_plan,
    without_own_plans,
)
from dspark.capture.targets.splitting import how_to_split
from dspark.capture.targets.tensor_parallel import check_tensor_parallel
from dspark.capture.workers.lockstep import LockStep, lock_step
from dspark.capture.workers.replica import Replica, find_replica, is_lost_peer, reaching_peers
from dspark.schemas.errors import InputError


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local_world: int) -> None:
    """The environment of a worker on nodes of ``local_world`` workers each."""
    local = {"LOCAL_RANK": rank % local_world, "LOCAL_WORLD_SIZE": local_world}
    for key, value in ({"RANK": rank, "WORLD_SIZE": world} | local).items():
        monkeypatch.setenv(key, str(value))


def test_without_options_every_worker_holds_a_whole_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_replica(None, False, "auto") is None
    torchrun(monkeypatch, 1, 4, 4)
    assert find_replica(None, False, None) is None
    assert find_replica(1, False, None) is None
    alone = lock_step(None, SimpleNamespace())  # type: ignore[arg-type]
    assert type(alone) is LockStep
    assert alone.writes
    assert [alone.agree(3), alone.agree(None)] == [3, None]
    alone.before_forward({}, [])
    alone.drain()


def test_replicas_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def replicas(tp: int | None, fsdp: bool) -> list[Replica | None]:
        found = []
        for rank in range(8):
            torchrun(monkeypatch, rank, 8, 4)
            found.append(find_replica(tp, fsdp, None))
        return found

    assert replicas(2, False) == [Replica("tp", 2, r - r % 2, r % 2) for r in range(8)]
    assert replicas(8, False) == [Replica("tp", 8, 0, r) for r in range(8)]
    assert replicas(None, True) == [Replica("fsdp", 4, r - r % 4, r % 4) for r in range(8)]
    assert [r.is_leader for r in replicas(None, True) if r] == [True, False, False, False] * 2


@pytest.mark.parametrize(
    ("tp", "fsdp", "device_map", "world", "local", "message"),
    [
        (2, True, None, 2, 2, "--tp and --fsdp split the target in two ways; give one of them"),
        (2, False, "auto", 2, 2, "--device-map .* --tp 2 over several processes; give one"),
        (None, True, "auto", 2, 2, "--device-map .* --fsdp over several processes; give one"),
        (4, False, None, 1, 1, r"--tp 4 .* there is one; .*: torchrun --nproc-per-node 4 \$\("),
        (None, True, None, 1, 1, r"--fsdp .*: torchrun .* \$\(which dspark\) capture --fsdp"),
        (4, False, None, 6, 6, "--tp 4: 6 workers are no whole number of replicas; .* multiple"),
        (None, True, None, 3, 1, "--fsdp .* each node has one; .*, or use --tp"),
    ],
)
def test_sentences(
    monkeypatch: pytest.MonkeyPatch,
    tp: int | None,
    fsdp: bool,
    device_map: str | None,
    world: int,
    local: int,
    message: str,
) -> None:
    torchrun(monkeypatch, 0, world, local)
    with pytest.raises(InputError, match=message):
        find_replica(tp, fsdp, device_map)


def skeleton(heads: int, kv_heads: int, intermediate: int) -> Any:
    text = {"hidden_size": 8 * heads, "intermediate_size": intermediate, "num_hidden_layers": 2}
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = CONFIG_MAPPING["llava"](
        text_config={"model_type": "llama", **text},
        vision_config={"model_type": "clip_vision_model", **vision},
    )
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ((12, 4, 48), 8, r"num_attention_heads 12, num_key_value_heads 4; choose --tp 2 or 4,"),
        ((12, 4, 42), 4, r"has intermediate_size 42; choose --tp 2, or use --fsdp"),
        ((12, 1, 48), 2, r"has num_key_value_heads 1; use --fsdp$"),
    ],
)
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int], tp: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_tensor_parallel("t", skeleton(*sizes), tp)


def test_sizes_that_divide() -> None:
    for tp in (2, 4):
        check_tensor_parallel("t", skeleton(12, 4, 48), tp)


def test_a_quantized_target_is_refused() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    replica = Replica("fsdp", 2, 0, 0)
    with pytest.raises(InputError, match="--fsdp: --target t is quantized, .*--device-map auto"):
        how_to_split("t", None, config, replica, trust_remote_code=False)


def test_an_older_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(tp_size: int = 1, fsdp_size: int = 1) -> None:
        """5.20 knows no fsdp_plan."""

    monkeypatch.setattr("transformers.distributed.DistributedConfig", older)
    config = skeleton(4, 2, 48).config
    replica = Replica("fsdp", 2, 0, 0)
    with pytest.raises(InputError, match=r"--fsdp: transformers \S+ is too old for it"):
        how_to_split("t", AutoModelForImageTextToText, config, replica, trust_remote_code=False)


def test_units_are_the_decoder_layers_alone() -> None:
    model = skeleton(4, 2, 48)
    assert sharding_plan(model) == {"model.language_model.layers.*": "free_full_weight"}
    config = model.config
    bare = without_own_plans(config)
    parts = (bare, bare.text_config, bare.vision_config)
    assert [part.base_model_fsdp_plan for part in parts] == [None] * 3
    assert config.text_config.base_model_fsdp_plan
    assert bare.to_dict() == config.to_dict()


def test_a_unit_that_batches_of_text_never_enter_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        good, bad = skeleton(4, 2, 48), skeleton(4, 2, 48)
        fully_shard(bad.model.vision_tower.encoder.layers[0])
        for model in (good, bad):
            for layer in model.model.language_model.layers:
                fully_shard(layer)
            fully_shard(model)
            assert original_class(model) is LlavaForConditionalGeneration
        check_units("t", good)
        with pytest.raises(InputError, match=r"--target t keeps \S+vision_tower\S+layers\.0 in"):
            check_units("t", bad)
    finally:
        dist.destroy_process_group()


def test_lost_peers_are_told_from_other_errors() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"
    for error in (RuntimeError(gloo), dist.DistBackendError("NCCL"), dist.DistNetworkError("x")):
        assert is_lost_peer(error)
        with pytest.raises(InputError, match="lost contact with another worker"), reaching_peers():
            raise error
    for error in (RuntimeError("shape '[1, 10]' is invalid"), ValueError("gloo")):
        assert not is_lost_peer(error)
        with pytest.raises(type(error)), reaching_peers():
            raise error


def test_capture_checks_it_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match="--tp 2 splits the target over several workers"):
        dspark.capture(1, target="/no/such/folder", tp=2)
