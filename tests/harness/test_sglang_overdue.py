"""Completions that an engine does not give in time: aborted, and told as such whether or not it takes the abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lora_harness.engines.base import SamplingParams
from lora_harness.engines.sglang import http
from lora_harness.engines.sglang.client import SglangRequest
from lora_harness.engines.sglang.http import HttpClient
from lora_plugins_sdk.errors import LoraError

ASKED = [
    SglangRequest(rid=f"slow-{n}", prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=4), seed=n)
    for n in range(3)
]


@contextmanager
def server(takes_aborts_after: float | None) -> Iterator[tuple[str, list[str]]]:
    """A server that never draws; its URL, and the paths that it was asked for."""
    asked: list[str] = []
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            if self.path != "/abort_request" or takes_aborts_after is None:
                closed.wait()
                return
            time.sleep(takes_aborts_after)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving.daemon_threads = True
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}", asked
    finally:
        closed.set()
        serving.shutdown()
        serving.server_close()


def wait_for(count: int, asked: list[str]) -> None:
    """A request's thread may start later than the client gives up."""
    deadline = time.monotonic() + 60
    while len(asked) < count:
        assert time.monotonic() < deadline, asked
        time.sleep(0.01)


def told(url: str) -> str:
    client = HttpClient(url, timeout=0.2)
    with pytest.raises(LoraError) as caught:
        client.generate(ASKED)
    client.close()
    return str(caught.value)


def test_an_engine_may_take_longer_for_an_abort_than_a_call_may_take() -> None:
    with server(takes_aborts_after=0.4) as (url, asked):
        assert "3 completions were not there after 0.2 s and were aborted -> raise rollout.sglang.timeout" in told(url)
        wait_for(4, asked)
    assert sorted(asked) == [*["/abort_request"] * 3, "/generate"]


def test_an_engine_that_takes_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_ABORT_SECONDS", 2.0)
    with server(takes_aborts_after=None) as (url, asked):
        words = told(url)
        wait_for(2, asked)
    assert "not there after 0.2 s and could not be aborted (/abort_request was not answered within 2 s)" in words
    assert sorted(asked) == ["/abort_request", "/generate"], "one is enough to know"
