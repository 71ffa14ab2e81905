"""Starting megatron-core: alone, under torchrun, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing import Layout, WorldError, run_world

pytestmark = pytest.mark.world

SCRIPT = """
import sys
import torch.distributed as dist
from lora_plugins_sdk.hosts.initialize import initialize_megatron
from lora_plugins_sdk.run import RunFacts
run = initialize_megatron(RunFacts(tp=int(sys.argv[1])))
line = f"rank {run.tp_rank} of {run.tp_group.size()} in a world of {dist.get_world_size()}\\n"
sys.stdout.write(line)  # in one piece: print would write the line break separately
dist.destroy_process_group()
"""


def _start(*command: str) -> list[str]:
    done = subprocess.run([sys.executable, *command], check=True, timeout=120, capture_output=True, text=True)
    return sorted(done.stdout.splitlines())


def test_one_process_needs_no_launcher() -> None:
    assert _start("-c", SCRIPT, "1") == ["rank 0 of 1 in a world of 1"]


def test_torchrun_world_is_joined(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert _start(*torchrun, str(script), "2") == [f"rank {rank} of 2 in a world of 2" for rank in (0, 1)]


def _start_again(destroy: bool) -> None:
    from megatron.core import parallel_state

    from lora_plugins_sdk.hosts.initialize import initialize_megatron

    if destroy:
        parallel_state.destroy_model_parallel()
    initialize_megatron(RunFacts(tp=2))


@pytest.mark.parametrize(
    ("destroy", "words"),
    [
        (True, r"world size 1: .*makes 2 ranks -> start 2 processes"),
        (False, r"parallel state: is initialised already -> .*from_megatron"),
    ],
    ids=["wrong sizes", "second time"],
)
def test_what_is_refused(destroy: bool, words: str) -> None:
    with pytest.raises(WorldError, match=words):
        run_world(_start_again, Layout(), destroy)
