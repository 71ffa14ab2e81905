"""Processes: an engine that dies is named with its log or started again, and none outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import raw_engine
import torch.distributed as dist
import transformers_reference
from engine_processes import alive, killed_while_it_draws, wait_until_gone
from own_process import OwnProcess
from rollout_runs import gap, opened, policy, requests, run_config, sequences, servers_of

from lora_harness.engines import Completion
from lora_harness.engines.sglang.http import HttpClient
from lora_plugins_sdk import write_adapter
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, run_world

# Starting an engine takes minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = Layout(tp=2)
# Enough to be killed on the way.
NEW_TOKENS = 200


def drawn_by_a_rank(model: str, output: str) -> tuple[list[Completion], list[Completion], list[str], list[int]]:
    """One rank's completions; the same ones while one of two engines is killed; on rank 0, what was said and the
    engines' process groups. The log is quoted when nobody is there to restart an engine."""
    said: list[str] = []
    engine = opened(run_config(Path(model), Path(output), mode="adapter", sglang={"engines": 2}), said)
    rank = dist.get_rank()
    try:
        first = policy(Path(model), 1)
        assert engine.publish(1, first.tensors, first.config) == 2 * first.num_bytes
        mine = requests(new_tokens=NEW_TOKENS)[rank :: RANKS.world_size]
        undisturbed = engine.generate(mine)
        if rank:
            return undisturbed, engine.generate(mine), said, []
        with killed_while_it_draws(servers_of(engine)[-1].log):
            again = engine.generate(mine)
        groups = [one.pid for one in servers_of(engine)]
        os.killpg(groups[0], signal.SIGKILL)
        with pytest.raises(LoraError, match=r"SGLang engine 0 .*engine-0\.log\): ended during /v1/models with signal"):
            engine._group.clients[0].loaded_adapters()
        return undisturbed, again, said, groups
    finally:
        engine.close()


def test_an_engine_that_dies_is_started_again_and_gets_its_adapter(
    tiny_qwen3_dir: Path, reference: OwnProcess, tmp_path: Path
) -> None:
    """B36, B40: both ranks go on with what they would have drawn. Requests are dealt out over two engines."""
    ranks = run_world(drawn_by_a_rank, RANKS, str(tiny_qwen3_dir), str(tmp_path / "run"), timeout=850.0)
    said, groups = ranks[0][2:]
    assert any("SGLang engine 1" in line and "failed while it drew completions" in line for line in said)
    assert said[-1].endswith("was restarted")
    write_adapter(policy(tiny_qwen3_dir, 1), tmp_path / "v1")
    for rank, (undisturbed, drawn, _, _) in enumerate(ranks):
        asked = requests(new_tokens=NEW_TOKENS)[rank :: RANKS.world_size]
        assert [one.token_ids for one in drawn] == [one.token_ids for one in undisturbed]
        expected = reference.run(
            transformers_reference.token_logprobs, str(tiny_qwen3_dir), sequences(asked, drawn), str(tmp_path / "v1")
        )
        assert gap(asked, drawn, expected) <= 1e-5 and {one.adapter_version for one in drawn} == {1}
    assert [wait_until_gone(group) for group in groups] == [[], []]


TRAINER = """
import sys, time
from pathlib import Path
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.server import SglangServer
arguments = {arguments!r}
server = SglangServer(arguments, log=Path(sys.argv[1]))
server.wait_until_ready(HttpClient(server.url).healthy, timeout=800.0)
print(server.pid, server.url, flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_a_trainer_that_was_killed(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """SIGKILL leaves the trainer no time to stop its server."""
    arguments = {**raw_engine.CPU_ARGUMENTS, "model_path": str(tiny_qwen3_dir), "skip_server_warmup": True}
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
