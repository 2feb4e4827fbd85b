"""What the workers of a capture say to the store that they share, in requests and bytes."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch.distributed as dist

from dspark.capture.progress import Step
from dspark.capture.workers.job import Job


class _Relay:
    """Passes bytes between a client and a server on this machine, and counts them.

    Attributes:
        port: where the client connects to.
        bytes: passed so far, both ways together.
    """

    def __init__(self, server_port: int) -> None:
        self.bytes = 0
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server_port))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.bytes += len(data)
            sink.sendall(data)


@dataclass(frozen=True)
class StoreTraffic:
    """Attributes:
    draw_bytes: both ways, for a worker to get its next shard: one request.
    report_bytes: both ways, for a worker to report its progress.
    report_requests: requests of a report.
    request_seconds: that a request takes one worker without the relay, others being silent.
    """

    draw_bytes: float
    report_bytes: float
    report_requests: int
    request_seconds: float


def measure_store(requests: int) -> StoreTraffic:
    """Let one worker of a job of 1,000 draw shards and report from a real store.

    Args:
        requests: of each kind.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = _Relay(server.port)
    job = _job(relay.port)

    def per_request(action: Callable[[], object]) -> float:
        action()
        before = relay.bytes
        for _ in range(requests):
            action()
        return (relay.bytes - before) / requests

    shards = job.draw(range(10 * requests))
    draw = per_request(lambda: next(shards))
    report = sum(
        per_request(lambda name=field.name: job.count(name, 1))  # type: ignore[misc]
        for field in fields(Step)
    )
    direct = _job(server.port)
    start = time.perf_counter()
    for _ in range(requests):
        direct.count("samples", 1)
    seconds = (time.perf_counter() - start) / requests
    return StoreTraffic(draw, report, len(fields(Step)), seconds)


def _job(port: int) -> Job:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return Job(999, 1000, 0, dist.PrefixStore("start/0/1000", store))
