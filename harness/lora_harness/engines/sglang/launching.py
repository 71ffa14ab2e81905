"""Clients of the engines of a run: servers that it starts, servers that run already, or one engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_harness.config.rollout import SglangSection
from lora_harness.engines.sglang.client import SglangClient
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import SglangServer
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_plugins_sdk.errors import LoraError

Say = Callable[[str], None]
LOG_DIRECTORY = "sglang"


def start_servers(arguments: Mapping[str, Any], section: SglangSection, *, output: Path, say: Say) -> EngineGroup:
    """Start `section.engines` servers side by side and wait until all serve.

    Args:
        arguments: SGLang's arguments; each server adds its number to `random_seed`.
        section: interpreter, number, ports and timeouts.
        output: the run's directory; logs go into `LOG_DIRECTORY` of it.
        say: told about the progress.

    Raises:
        LoraError: one did not start, with the end of its log; the others were stopped.
    """

    def launch(index: int, port: int | None) -> SglangServer:
        return SglangServer(
            {**arguments, "random_seed": arguments["random_seed"] + index},
            log=output / LOG_DIRECTORY / f"engine-{index}.log",
            python=section.python,
            port=port,
            label=f"SGLang engine {index}",
        )

    servers: list[SglangServer] = []

    def ready(server: SglangServer) -> HttpClient:
        client = HttpClient(server.url, server=server, timeout=section.timeout)
        seconds = server.wait_until_ready(client.healthy, timeout=section.start_timeout)
        say(f"{server.label} serves {server.url} after {seconds:.0f} s")
        return client

    def restart(index: int) -> SglangClient:
        # On the same port: other ranks go on with the clients that they have.
        servers[index] = launch(index, servers[index].port)
        return ready(servers[index])

    try:
        for index in range(section.engines):
            servers.append(launch(index, None if section.port is None else section.port + index))
        say(f"starting {section.engines} SGLang engine{'s' * (section.engines > 1)}; log: {servers[0].log}")
        return EngineGroup([ready(server) for server in servers], restart=restart, say=say)
    except BaseException:
        for server in servers:
            server.stop()
        raise


def connect(urls: Sequence[str], *, timeout: float, say: Say) -> EngineGroup:
    """Clients of servers that run already.

    Args:
        urls: one for each engine.
        timeout: seconds for one call.
        say: told what becomes of the engines.

    Raises:
        LoraError: one does not answer.
    """
    clients = [HttpClient(url, timeout=timeout) for url in urls]
    for client in clients:
        if not client.healthy():
            raise LoraError(
                f"engine {client.name}", reason="does not answer", cure="start it first, and check rollout.sglang.urls"
            )
    return EngineGroup(clients, say=say)
