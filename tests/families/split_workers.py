"""What one of two workers of a replica checks; ``test_split_targets`` runs it in two processes.

Usage: python split_workers.py FOLDER OUT PORT PORT PORT, where FOLDER holds a checkpoint per family
and ``data.parquet``. Writes the names of the checks that passed, and what went wrong in the one
that did not; leaves captures in FOLDER.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
import torch.distributed as dist
from conversation_data import noise_picture
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForImageTextToText

import dspark
from dspark.capture.rendering.encode import encode_batch
from dspark.capture.settings import TargetOptions
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.probe import probe_target
from dspark.capture.targets.splitting import fill, how_to_split
from dspark.capture.targets.target import Target
from dspark.capture.workers.job import Job
from dspark.capture.workers.lockstep import lock_step
from dspark.capture.workers.replica import LOST_PEER, Replica, find_replica
from dspark.schemas.conversations import Conversation
from dspark.schemas.errors import InputError

CPU = torch.device("cpu")
FAMILIES = ("qwen2_5_vl", "llava", "gemma3", "qwen3_vl")
TENSOR_PARALLEL = ("qwen2_5_vl", "gemma3")
CONVERTED = ("kimi_k25", "minimax_m3_vl", "qwen3_vl_moe")
LAYERS = (-1, 0, 2)
CAPTURE: dict[str, Any] = {"dtype": "fp32", "batch_tokens": 200}
CAPTURES: dict[str, dict[str, Any]] = {"fsdp": {"fsdp": True}, "tp": {"tp": 2}}


def talk(words: str, seed: int | None) -> Conversation:
    question: list[dict[str, Any]] = [{"type": "text", "text": words}]
    if seed is not None:
        question.insert(0, {"type": "image", "image": noise_picture(seed, (64, 32))})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": f"It is {words}."}]},
    ]


def text_batches() -> list[list[Conversation]]:
    return [[talk("a cat", None), talk("two red cats and more", None)], [talk("x", None)]]


def picture_batches() -> list[list[Conversation]]:
    return [[talk("red", 1), talk("and text", None)], [talk("a", 2)], [talk("last one", 3)]]


def run(target: Target, batch: list[Conversation], step: Any = None) -> Features:
    encoded = encode_batch(batch, target.processor, loss_mask=False)
    if step is not None:
        step.before_forward(encoded.tensors, list(range(len(batch))))
    dtype = target.embedding.weight.dtype
    assert isinstance(dtype, torch.dtype)
    return capture_features(
        target, encoded.tensors, encoded.lengths, layers=LAYERS, dtype=dtype, with_logits=True
    )


def tensors_of(features: Features) -> dict[str, torch.Tensor]:
    assert features.logits is not None
    own = {"positions": features.position_ids, "last": features.last_hidden}
    return {**features.stored, **own, "logits": features.logits}


def check_same(got: Features, expected: Features) -> None:
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(tensors_of(got)[name], tensor), name


def check_close(got: Features, expected: Features) -> None:
    """Sums over the parts of a split matrix are rounded in another order."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 5e-2}[expected.last_hidden.dtype]
    assert torch.equal(got.position_ids, expected.position_ids)
    for name, tensor in tensors_of(expected).items():
        largest = tensor.abs().max().item()
        assert (tensors_of(got)[name] - tensor).abs().max().item() <= tolerance * largest, name


def check_facts(split: Target, whole: Target) -> None:
    """What the manifest says of the target does not depend on how it was run."""
    assert split.config_hash() == whole.config_hash()
    assert split.processor_hash() == whole.processor_hash()
    assert split.model.dtype == whole.model.dtype
    facts = probe_target(whole, list(LAYERS), torch.float32).observed
    assert split.facts(32, 9, facts) == whole.facts(32, 9, facts)
    attention = split.model.config._attn_implementation
    assert attention == whole.model.config._attn_implementation
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        split.model.config.save_pretrained(one)
        whole.model.config.save_pretrained(other)
        assert (Path(one) / "config.json").read_text() == (Path(other) / "config.json").read_text()
    tensors, expected = split.head_tensors(), whole.head_tensors()
    assert tensors.keys() == expected.keys()
    assert {k for k, t in tensors.items() if not torch.equal(t, expected[k])} == set()


def held_parameters(target: Target) -> int:
    """Numbers that this worker holds of the decoder layers."""
    parameters = target.backbone.layers.parameters()
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def check_fully_sharded(family: str, folder: Path, replica: Replica) -> None:
    """One worker has text alone, the other pictures and one batch more."""
    whole = load_target(str(folder / family), CPU)
    split = load_target(str(folder / family), CPU, TargetOptions(), replica)
    assert held_parameters(split) <= 0.6 * held_parameters(whole)
    probed = probe_target(split, list(LAYERS), torch.float32)
    assert probed.observed == probe_target(whole, list(LAYERS), torch.float32).observed
    check_facts(split, whole)
    step = lock_step(replica, split)
    assert step.writes
    assert step.agree(5) == 5
    for batch in picture_batches() if replica.rank else text_batches():
        got = run(split, batch, step)
        expected = run(whole, batch)
        check_same(got, expected)
        assert prove_head(split, got) == prove_head(whole, expected)
    step.drain()
    assert held_parameters(split) <= 0.6 * held_parameters(whole)
    check_facts(split, whole)


def check_tensor_parallel(family: str, folder: Path, replica: Replica) -> None:
    whole = load_target(str(folder / family), CPU)
    split = load_target(str(folder / family), CPU, TargetOptions(), replica)
    assert held_parameters(split) <= 0.6 * held_parameters(whole)
    probed = probe_target(split, list(LAYERS), torch.float32)
    assert probed.observed == probe_target(whole, list(LAYERS), torch.float32).observed
    check_facts(split, whole)
    step = lock_step(replica, split)
    assert step.writes == replica.is_leader
    assert [step.agree(n if replica.is_leader else None) for n in (0, 7, None)] == [0, 7, None]
    for batch in [*text_batches(), *picture_batches()]:
        got = run(split, batch, step)
        check_close(got, run(whole, batch))
        prove_head(split, got)  # raises where the head does not give the logits back
    step.drain()


def check_every_weight(family: str, folder: Path, replica: Replica) -> None:
    """Of checkpoints whose weights transformers merges, splits or permutes when it loads them."""
    config = AutoConfig.from_pretrained(folder / family)
    whole = AutoModelForImageTextToText.from_pretrained(folder / family)
    how = how_to_split(
        family, AutoModelForImageTextToText, config, replica, trust_remote_code=False
    )
    split = AutoModelForImageTextToText.from_pretrained(folder / family, **how)
    fill(split, whole if replica.is_leader else None)
    held = dict((*split.named_parameters(), *split.named_buffers()))
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        part = held.pop(name)
        got = part.full_tensor() if isinstance(part, DTensor) else part
        assert torch.equal(got, tensor), name
    assert not held


def check_different_inputs(family: str, folder: Path, replica: Replica) -> None:
    target = load_target(str(folder / family), CPU, TargetOptions(), replica)
    step = lock_step(replica, target)
    encoded = encode_batch([talk("a cat", 1)], target.processor, loss_mask=False)
    step.before_forward(encoded.tensors, [3])
    if replica.rank:
        encoded.tensors["pixel_values"][-1, -1] += 1
    try:
        step.before_forward(encoded.tensors, list(range(20)))
    except InputError as error:
        assert "different inputs of rows 0, 1, 2, 3, 4, 5, 6, 7, …;" in str(error), error
    else:
        raise AssertionError("not noticed")


def check_refused(family: str, folder: Path, replica: Replica) -> None:
    """Before any weight is read: there are none here."""
    empty = folder / f"{family}-without-weights"
    try:
        load_target(str(empty), CPU, TargetOptions(), replica)
    except InputError as error:
        assert "no tensor-parallel plan that splits the decoder layers" in str(error), error
        assert "use --fsdp" in str(error)
    else:
        raise AssertionError("not refused")


def check_lost_peer(family: str, folder: Path, replica: Replica) -> None:
    """The other worker is killed; must be the last check."""
    target = load_target(str(folder / family), CPU, TargetOptions(), replica)
    step = lock_step(replica, target)
    run(target, text_batches()[0], step)
    if replica.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step.drain()
    except InputError as error:
        assert str(error) == LOST_PEER
    else:
        raise AssertionError("not noticed")


def check_capture(name: str, folder: Path, options: dict[str, Any]) -> None:
    data, target, out = (str(folder / n) for n in ("data.parquet", "qwen2_5_vl", name))
    report = dspark.capture(3, target=target, data=data, out=out, **CAPTURE, **options)
    assert (report is None) == (os.environ["RANK"] == "1")


def checks(folder: Path) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    fsdp, tp = find_replica(None, True, None), find_replica(2, False, None)
    for family in FAMILIES:
        yield f"fsdp {family}", check_fully_sharded, (family, folder, fsdp)
    for family in TENSOR_PARALLEL:
        yield f"tp {family}", check_tensor_parallel, (family, folder, tp)
    for family in CONVERTED:
        yield f"fsdp weights {family}", check_every_weight, (family, folder, fsdp)
    yield f"tp weights {CONVERTED[-1]}", check_every_weight, (CONVERTED[-1], folder, tp)
    yield "tp without a plan", check_refused, ("qwen3_vl", folder, tp)
    yield "tp different inputs", check_different_inputs, ("qwen2_5_vl", folder, tp)
    yield "lost peer", check_lost_peer, ("qwen2_5_vl", folder, fsdp)


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    with open(out, "w") as report:
        for name, options in CAPTURES.items():
            os.environ["MASTER_PORT"] = sys.argv.pop()
            passes(report, f"capture {name}", check_capture, name, folder, options)
        os.environ["MASTER_PORT"] = sys.argv.pop()
        store = Job.join().store
        for name, check, arguments in checks(folder):
            arguments[-1].connect(dist.PrefixStore(name, store), CPU)
            passes(report, name, check, *arguments)
            if dist.is_initialized():  # nothing drained it
                dist.destroy_process_group()


def passes(report: TextIO, name: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except BaseException:
        print(f"failed: {name}\n{traceback.format_exc()}", file=report, flush=True)
        os._exit(1)  # the other one waits
    print(f"passed: {name}", file=report, flush=True)


if __name__ == "__main__":
    main()
