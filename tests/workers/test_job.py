"""What workers share through their store."""

import threading
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dspark.capture.workers.job import Job
from dspark.schemas.errors import FollowerError, InputError, StoppedError


def jobs(size: int) -> list[Job]:
    store = dist.HashStore()
    return [Job(rank, size, rank, store) for rank in range(size)]


@given(st.integers(1, 6), st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.data())
def test_each_shard_goes_to_one_worker_whatever_their_speed(
    workers: int, shards: list[int], data: st.DataObject
) -> None:
    draws = [job.draw(shards) for job in jobs(workers)]
    drawn: list[int] = []
    while draws:
        turn = data.draw(st.integers(0, len(draws) - 1))
        shard = next(draws[turn], None)
        if shard is None:
            draws.pop(turn)
        else:
            drawn.append(shard)
    assert drawn == shards


def test_the_counter_is_atomic() -> None:
    drawn: list[int] = []
    members = jobs(8)
    threads = [
        threading.Thread(target=lambda job=job: drawn.extend(job.draw(range(2000))))
        for job in members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(drawn) == Counter(range(2000))


def test_the_first_failure_speaks_and_the_others_are_silent() -> None:
    first, second, third = jobs(3)
    with pytest.raises(InputError, match="why"), first:
        raise InputError("why")
    with pytest.raises(FollowerError), second:
        raise InputError("because of the first")
    with pytest.raises(SystemExit) as stopped, third:
        raise StoppedError(15)
    assert stopped.value.code == 143


def test_alone_every_error_passes() -> None:
    (job,) = jobs(1)
    with pytest.raises(StoppedError), job:
        raise StoppedError(2)


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "-1"},
        {"WORLD_SIZE": "2"},  # and nothing else
        {"WORLD_SIZE": "2", "RANK": "first"},
        {"WORLD_SIZE": "2", "RANK": "5"},
    ],
)
def test_an_environment_that_torchrun_did_not_set(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun|unset it"):
        Job.join()
    monkeypatch.setenv("WORLD_SIZE", "")
    assert Job.join().size == 1
