"""Pictures from web addresses, from a server on this machine."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation_data import noise_picture, png

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations import open_conversations
from dspark.capture.conversations.download import Downloads
from dspark.capture.settings import RowOptions

PICTURE = noise_picture(0, (8, 8))
asked: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked[self.path] += 1
        data = png(PICTURE)
        if self.path == "/missing.png":
            self.send_error(404)
            return
        if self.path == "/busy.png" and asked[self.path] < 3:
            self.send_error(503)
            return
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        if self.path == "/file.png":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/large.png":
            data = bytes(200_000)
        self.send_header("Content-Length", str(len(data) + (5 if self.path == "/cut.png" else 0)))
        self.end_headers()
        if self.path == "/slow.png":
            time.sleep(1)
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_fetched_once(server: str) -> None:
    downloads = Downloads(keep_bytes=len(png(PICTURE)), pause=0)
    for _ in range(2):
        assert downloads.fetch(f"{server}/a.png?x=1", "p") == png(PICTURE)
    assert asked["/a.png?x=1"] == 1
    downloads.fetch(f"{server}/a.png?x=2", "p")  # takes the first one's place
    downloads.fetch(f"{server}/a.png?x=1", "p")
    assert asked["/a.png?x=1"] == 2
    assert downloads.fetch(f"{server}/moved.png", "p") == png(PICTURE)
    assert downloads.fetch(f"{server}/busy.png", "p") == png(PICTURE)


@pytest.mark.parametrize(
    ("address", "problem", "times"),
    [
        ("/missing.png", "HTTP 404", 1),
        ("/large.png", "more than 100,000 bytes", 1),
        ("/slow.png", "timed out", 3),
        ("/cut.png", "", 3),
        ("/file.png", "HTTP 302", 1),
    ],
)
def test_not_to_be_had(server: str, address: str, problem: str, times: int) -> None:
    downloads = Downloads(timeout=0.2, max_bytes=100_000, pause=0)
    before = asked[address]
    with pytest.raises(BadRowError, match=f"picture cannot be downloaded: p: .*{problem}"):
        downloads.fetch(server + address, "p")
    assert asked[address] - before == times


def test_no_address() -> None:
    for address in ("http://[", "http://a b/", "https:///a.png", "http://\ud800"):
        with pytest.raises(BadRowError, match="picture cannot be downloaded: p: "):
            Downloads(pause=0).fetch(address, "p")


def test_nobody_listens() -> None:
    with pytest.raises(BadRowError, match="picture cannot be downloaded: p: .*refused"):
        Downloads(pause=0).fetch("http://127.0.0.1:9/a.png", "p")


def test_only_when_allowed(server: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    part = {"type": "image_url", "image_url": {"url": f"{server}/a.png?y"}}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(BadRowError, match="picture is a web address"):
        open_conversations(path).read(0)
    assert asked["/a.png?y"] == 0
    row = open_conversations(path, RowOptions(allow_download=True)).read(0)
    assert (np.asarray(row.messages[0]["content"][0]["image"]) == np.asarray(PICTURE)).all()
