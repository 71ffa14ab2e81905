"""A server that cannot start: the error says what to change. This environment has no SGLang; tests/sglang has."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import HOST, SglangServer
from lora_plugins_sdk.errors import LoraError


def interpreter(folder: Path, commands: str) -> Path:
    """A shell script in the place of Python."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_an_interpreter_without_sglang_is_named(tmp_path: Path, safe_path: str):
    log = tmp_path / "logs" / "engine.log"
    environment = {"PYTHONSAFEPATH": safe_path}
    arguments = {"model_path": "m", "device": "cuda"}
    server = SglangServer(arguments, log=log, python=Path(sys.executable), environment=environment)
    with pytest.raises(LoraError, match=r"rollout\.sglang\.python = '.*python.*': cannot import SGLang .*install"):
        server.wait_until_ready(lambda: False, timeout=60.0)
    server.stop()
    written = json.loads(log.with_suffix(".json").read_text())
    assert written == {"model_path": "m", "device": "cuda", "host": HOST, "port": server.port}


@pytest.mark.parametrize(("kernels", "said"), [("0", "neither its CPU kernels nor"), ("1", "cannot import SGLang")])
def test_a_cpu_needs_kernels_or_their_replacement(tmp_path: Path, kernels: str, said: str):
    """SGLang asks for its own with this variable at 1 only; at 0 it would fail obscurely."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    environment = {"SGLANG_USE_CPU_ENGINE": kernels}
    server = SglangServer({"device": "cpu"}, log=tmp_path / "engine.log", python=bare, environment=environment)
    with pytest.raises(LoraError, match=said):
        server.wait_until_ready(lambda: False, timeout=60.0)
    server.stop()


def test_a_path_that_is_no_interpreter(tmp_path: Path):
    with pytest.raises(LoraError, match=r"rollout\.sglang\.python = '.*/absent': cannot be started \(No such file"):
        SglangServer({}, log=tmp_path / "engine.log", python=tmp_path / "absent")


def test_an_interpreter_that_dies_shows_the_end_of_its_log(tmp_path: Path):
    script = interpreter(tmp_path, "echo first words\necho last words\nexit 3")
    log = tmp_path / "engine.log"
    log.write_text("of an earlier run\n")
    server = SglangServer({}, log=log, python=script, label="SGLang engine 4")
    with pytest.raises(LoraError, match=r"engine 4 .*ended while it started with exit code 3.*\n.*first.*\nlast words"):
        server.wait_until_ready(lambda: False, timeout=60.0)
    with pytest.raises(LoraError) as told:
        server.raise_if_dead("later")
    assert "earlier run" not in str(told.value)
    server.stop()


def test_a_server_that_never_answers_is_stopped(tmp_path: Path):
    script = interpreter(tmp_path, "sleep 1000")
    server = SglangServer({}, log=tmp_path / "engine.log", python=script)
    with pytest.raises(LoraError, match=r"did not answer within 0\.5 s.*\n\(nothing was printed\).*start_timeout"):
        server.wait_until_ready(lambda: False, timeout=0.5)
    assert server.died()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LoraError, match=rf"rollout\.sglang\.port = {port}: cannot be served on \(Address already"):
            SglangServer({}, log=tmp_path / "engine.log", port=port)
    assert not (tmp_path / "engine.log").exists()


def test_the_port_is_the_servers_from_the_start(tmp_path: Path):
    """Many seconds pass until it serves; neither another run nor a connection's near end may take it meanwhile."""
    script = interpreter(tmp_path, "exec sleep 1000")
    server = SglangServer({}, log=tmp_path / "engine.log", python=script)
    with pytest.raises(LoraError, match=rf"rollout\.sglang\.port = {server.port}: cannot be served on"):
        SglangServer({}, log=tmp_path / "other.log", python=script, port=server.port)
    server.stop()
    again = SglangServer({}, log=tmp_path / "engine.log", python=script, port=server.port)
    again.stop()


def test_a_server_that_is_not_there(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        # Bound and not listened at: nobody else can have it.
        url = f"http://{HOST}:{probe.getsockname()[1]}"
        client = HttpClient(url)
        assert not client.healthy()
        with pytest.raises(LoraError, match=rf"engine {url}: cannot be reached for /v1/models \(ConnectError"):
            client.loaded_adapters()
        client.close()
        client.close()
