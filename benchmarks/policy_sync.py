"""A sync of the policy to SGLang: adapter mode against merge mode, the same model and run, in time and bytes.

Two servers of the real SGLang serve one randomly initialised Qwen3, one with LoRA and one without; each round
publishes a new random adapter in every way, in turn. A sync is everything from exported tensors to a version that
answers: checks, folding, sending, the engine's own work, checksums. Seconds are by the clock, since most of the work is
the servers'. `wire_bytes` and `messages` are those of the HTTP requests. The trainer's collectives are counted on two
tensor-parallel ranks: the export gathers the adapter in either mode, and merge mode reads the base from its files.

The servers run with an interpreter that has SGLang (`--python`), on a CPU with this project's plugin.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx2
import torch

from benchmarks.command import arguments
from benchmarks.counted_collectives import CountedCollectives
from benchmarks.report import Goal, write_report
from benchmarks.training_step import save_base, training_config
from lora_harness.engines.sglang.arguments import engine_arguments
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import SglangServer
from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import LoraSettings, Packer
from lora_harness.engines.sglang.sync.serving import PolicySync
from lora_harness.engines.sglang.sync.transport import DirectoryTransport, MemoryTransport
from lora_harness.trainer import MegatronPolicy
from lora_plugins_sdk import PeftAdapter
from lora_plugins_sdk.testing import Layout, close_pool, current_run, run_world

GOAL, BUFFER_MIB = 20.0, 512
TARGETS = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})


class Messages:
    """HTTP requests of one client: how many, and the bytes of their bodies."""

    def __init__(self, client: HttpClient) -> None:
        self.count = self.bytes = 0
        client._http.event_hooks["request"].append(self._sent)

    def _sent(self, request: httpx2.Request) -> None:
        self.count += 1
        self.bytes += int(request.headers.get("Content-Length", 0))


class Form:
    """One way to publish, with what its syncs took.

    Args:
        sync: the way.
        messages: of its engine.
        adapters: a new one for each round.
        first: number of the first version; ways that share an engine must not share names.
    """

    def __init__(self, sync: PolicySync, messages: Messages, adapters: Sequence[PeftAdapter], first: int) -> None:
        self._sync, self._messages, self._adapters = sync, messages, adapters
        self._version = first - 1
        self.tensor_bytes = self.wire_bytes = self.messages = 0

    def publish(self) -> None:
        """The next version."""
        adapter = self._adapters[self._version % len(self._adapters)]
        self._version += 1
        count, sent = self._messages.count, self._messages.bytes
        self.tensor_bytes = self._sync.publish(self._version, adapter.tensors, adapter.config)
        self.messages, self.wire_bytes = self._messages.count - count, self._messages.bytes - sent


def export_on_rank(base: Path, rank: int) -> dict[str, int]:
    """Collectives of a decision and an export on this rank, and their bytes."""
    policy = MegatronPolicy(training_config(base, rank, 2), current_run())
    policy.export()
    with CountedCollectives() as counted:
        policy.published.largest_change()
        policy.export()
    return {"collectives": counted.calls, "collective_bytes": counted.bytes}


def random_adapters(base: Path, rank: int, count: int) -> list[PeftAdapter]:
    """Adapters on every linear of the base; B is not zero."""
    shapes = Folder(base, BUFFER_MIB).base
    adapters = []
    for _ in range(count):
        tensors: dict[str, torch.Tensor] = {}
        for name in shapes.where:
            module = name.removesuffix(".weight")
            if module.endswith("_proj"):
                out, width = shapes.tensor(name).shape
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, width) * 0.02
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank) * 0.02
        leaves = sorted({name.split(".")[-3] for name in tensors})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": leaves}
        adapters.append(PeftAdapter(tensors=tensors, config=config))
    return adapters


def launched(given: argparse.Namespace, folder: Path, name: str, lora: LoraSettings | None) -> SglangServer:
    """A server that starts."""
    settings = engine_arguments(
        model_path=str(folder / "base"),
        dtype="float32",
        seed=0,
        max_running_requests=8,
        context=1024,
        lora=lora,
        recurrent=False,
        config_keys={},
        snapshots=False,
        cpu=not torch.cuda.is_available(),
        given={"log_level": "error"},
    )
    return SglangServer(settings, log=folder / f"{name}.log", python=given.python)


def every_form(given: argparse.Namespace, folder: Path, servers: list[SglangServer]) -> dict[str, Form]:
    """Every way to publish, on two servers that answer; the caller stops them."""
    base = folder / "base"
    lora = LoraSettings(targets=TARGETS, max_rank=given.rank, slots=3)
    servers += [launched(given, folder, "adapter", lora), launched(given, folder, "merge", None)]
    clients = [HttpClient(server.url, server=server) for server in servers]
    for server, client in zip(servers, clients, strict=True):
        server.wait_until_ready(client.healthy, timeout=900.0)
    with_lora, without = (EngineGroup([client]) for client in clients)
    on_adapter, on_merge = (Messages(client) for client in clients)
    memory = AdapterSync(with_lora, Packer(base, lora), lora, MemoryTransport(BUFFER_MIB))
    directory = AdapterSync(with_lora, Packer(base, lora), lora, DirectoryTransport(folder / "adapters"))
    merge = MergeSync(without, Folder(base, BUFFER_MIB), dtype=torch.float32, buffer_mib=BUFFER_MIB)
    adapters = random_adapters(base, given.rank, count=2)
    return {
        "adapter, memory": Form(memory, on_adapter, adapters, first=1),
        "adapter, directory": Form(directory, on_adapter, adapters, first=1001),
        "merge": Form(merge, on_merge, adapters, first=1),
    }


def clocked(forms: Mapping[str, Form], rounds: int) -> dict[str, list[float]]:
    """Seconds by the clock of every form in every round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            form.publish()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def options(parser: argparse.ArgumentParser) -> None:
    """Model and interpreter."""
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--layers", type=int, default=6, help="layers")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank")
    parser.add_argument("--python", type=Path, help="interpreter that has SGLang (default: this one)")
    parser.add_argument("--folder", type=Path, help="where to make everything (default: the system's temporary files)")


def main() -> None:
    """Measure and write policy_sync.json."""
    given = arguments(__doc__, rounds=5, more=options)
    servers: list[SglangServer] = []
    with TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        save_base(folder / "base", given.hidden, given.layers, given.vocab)
        weights = Folder(folder / "base", BUFFER_MIB).base
        collectives = run_world(export_on_rank, Layout(tp=2), folder / "base", given.rank, timeout=600)[0]
        close_pool()
        try:
            forms = every_form(given, folder, servers)
            seconds = clocked(forms, given.rounds)
        finally:
            for server in servers:
                server.stop()
    rows = [
        {
            "form": form,
            "seconds": median(seconds[form]),
            "tensor_bytes": one.tensor_bytes,
            "wire_bytes": one.wire_bytes,
            "messages": one.messages,
            **collectives,
            "merge_time_over_it": median(a / b for a, b in zip(seconds["merge"], seconds[form], strict=True)),
            "merge_bytes_over_it": forms["merge"].tensor_bytes / one.tensor_bytes,
        }
        for form, one in forms.items()
    ]
    goals = [
        Goal(
            what=f"time of a merge-mode sync over one in adapter mode ({row['form']})",
            bound=GOAL,
            measured=row["merge_time_over_it"],
            at_least=True,
        )
        for row in rows[:-1]
    ]
    parameters = sum(weights.tensor(one).num_bytes // 4 for one in weights.where)
    shown = {**vars(given), "base_parameters": parameters}
    write_report(given.output / "policy_sync.json", given=shown, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
