"""A plain server of a folder's files with byte ranges, in a process of its own, which can fail.

It answers HTTP clients and, since to read an object is the same there, those of S3 with requests
for ``/BUCKET/KEY``, of which it counts those that are not signed. Run as a program it prints its
port; ``start`` runs it so.
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

CONTROL = "/_control"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    lock = threading.Lock()
    sent: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    unsigned = 0
    fault: dict[str, Any] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            type(self).fault = json.loads(body)
            told = {"sent": self.sent, "requests": self.requests, "unsigned": self.unsigned}
            self._answer(200, json.dumps(told).encode())
            if self.fault.get("forget"):
                self.sent.clear()
                self.requests.clear()

    def do_HEAD(self) -> None:  # noqa: N802
        self._get(body=False)

    def do_GET(self) -> None:  # noqa: N802
        self._get(body=True)

    def _get(self, *, body: bool) -> None:
        name = unquote(self.path.partition("?")[0]).lstrip("/")
        with self.lock:
            self.requests[f"{self.command} {name}"] += 1
            type(self).unsigned += "AWS4-HMAC-SHA256" not in self.headers.get("Authorization", "")
            fault = self.fault if re.search(self.fault.get("match", "$^"), name) else {}
            if fault and body:
                self.fault["times"] = self.fault.get("times", 1) - 1
                if self.fault["times"] < 0:
                    fault = {}
        path = self.root / name
        if not path.is_file():
            return self._answer(404, b"")
        time.sleep(fault.get("delay", 0))
        if body and "status" in fault:
            return self._answer(fault["status"], b"")
        size = path.stat().st_size
        start, end, status = 0, size, 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, status = int(found[1]), 206
            end = min(size, int(found[2]) + 1) if found[2] else size
            if start >= size:
                return self._answer(416, b"")
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Last-Modified", "Sun, 01 Jan 2023 00:00:00 GMT")
        self.send_header("ETag", f'"{size}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if not body:
            return None
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        if "drop_after" in fault:
            data = data[: fault["drop_after"]]
            self.close_connection = True
        self.wfile.write(data)
        with self.lock:
            self.sent[name] += len(data)
        return None

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@dataclass
class ObjectServer:
    """The server's process."""

    process: "subprocess.Popen[str]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def control(self, **fault: Any) -> dict[str, Any]:
        """Set what fails from now on; returns what was sent and asked for so far.

        Args:
            fault: ``match``, a pattern of names, and for so many ``times`` ``status``, ``delay``
                (seconds) or ``drop_after`` (bytes of the body); ``forget`` clears the counts.
        """
        request = urllib.request.Request(self.url + CONTROL, json.dumps(fault).encode())
        with urllib.request.urlopen(request) as answer:
            told: dict[str, Any] = json.loads(answer.read())
        return told

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start(root: Path, port: int = 0) -> ObjectServer:
    """Start a server of the files under ``root``."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(root), str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return ObjectServer(process, int(process.stdout.readline()))


if __name__ == "__main__":
    _Handler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
