"""Processes: an engine that dies is named with its log or started again, and none outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import raw_engine
import transformers_reference
from own_process import OwnProcess
from rollout_runs import gap, opened, policy, requests, run_config, sequences

from lora_harness.engines.sglang.http import HttpClient
from lora_plugins_sdk import write_adapter
from lora_plugins_sdk.errors import LoraError

# Starting an engine takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


def alive(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_until_gone(group: int, seconds: float = 30.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := alive(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill_scheduler(group: int) -> None:
    """SIGKILL for the child process that holds the model."""
    [scheduler] = [one for one in alive(group) if "scheduler" in " ".join(psutil.Process(one).cmdline())]
    os.kill(scheduler, signal.SIGKILL)


def test_an_engine_that_dies_is_started_again_and_gets_its_adapter(
    tiny_qwen3_dir: Path, reference: OwnProcess, tmp_path: Path
) -> None:
    """Also: requests are dealt out over two engines, and the log is quoted when nobody may restart."""
    said: list[str] = []
    run = run_config(tiny_qwen3_dir, tmp_path, mode="adapter", sglang={"engines": 2})
    engine = opened(run, said)
    groups = [client._server.pid for client in engine._group.clients]  # type: ignore[attr-defined]
    try:
        first = policy(tiny_qwen3_dir, 1)
        assert engine.publish(1, first.tensors, first.config) == 2 * first.num_bytes
        kill_scheduler(groups[1])
        asked = requests()
        drawn = engine.generate(asked)
        assert any("SGLang engine 1" in line and "failed while it drew completions" in line for line in said)
        assert said[-1].endswith("was restarted")
        write_adapter(first, tmp_path / "v1")
        expected = reference.run(
            transformers_reference.token_logprobs,
            str(tiny_qwen3_dir),
            sequences(asked, drawn),
            str(tmp_path / "v1"),
        )
        assert gap(asked, drawn, expected) <= 1e-5 and {one.adapter_version for one in drawn} == {1}

        groups = [client._server.pid for client in engine._group.clients]  # type: ignore[attr-defined]
        client = engine._group.clients[0]
        os.killpg(groups[0], signal.SIGKILL)
        with pytest.raises(LoraError, match=r"SGLang engine 0 .*engine-0\.log\): ended during /v1/models with signal"):
            client.loaded_adapters()
    finally:
        engine.close()
    assert [wait_until_gone(group) for group in groups] == [[], []]


TRAINER = """
import sys, time
from pathlib import Path
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import SglangServer
arguments = {arguments!r}
server = SglangServer(arguments, log=Path(sys.argv[1]))
server.wait_until_ready(HttpClient(server.url).healthy, timeout=280.0)
print(server.pid, server.url, flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_a_trainer_that_was_killed(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """SIGKILL leaves the trainer no time to stop its server."""
    arguments = {**raw_engine.CPU_ARGUMENTS, "model_path": str(tiny_qwen3_dir)}
    code = TRAINER.format(arguments=arguments)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "engine.log")], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        group, url = trainer.stdout.readline().split()
        assert len(alive(int(group))) >= 3, "server, scheduler, detokenizer"
        trainer.kill()
    assert wait_until_gone(int(group)) == []
    assert not HttpClient(url).healthy()


def test_an_argument_that_this_sglang_does_not_know(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    wrong = run_config(tiny_qwen3_dir, tmp_path, mode="merge", sglang={"arguments": {"max_totl_tokens": 64}})
    with pytest.raises(LoraError, match=r"arguments\.max_totl_tokens: .*no such argument -> did you mean 'max_total_t"):
        opened(wrong)
    log = (tmp_path / "sglang" / "engine-0.log").read_text()
    assert "lora-grpo-problem" in log
