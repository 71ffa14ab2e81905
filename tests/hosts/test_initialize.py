"""Starting megatron-core: alone, under torchrun, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing import Layout, WorldError, current_run, run_world

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


def _experts_place() -> tuple[int, ...]:
    run = current_run()
    groups = (run.etp_group, run.ep_group, run.etp_ep_group, run.expert_dp_group, run.dp_group)
    assert all(group is not None for group in groups)
    sizes = tuple(group.size() for group in groups if group is not None)
    return run.etp_rank, run.ep_rank, run.expert_dp_rank, *sizes


@pytest.mark.mcore_matrix
@pytest.mark.parametrize(
    ("layout", "ranks", "sizes"),
    [
        (Layout(dp=2, ep=2), [(0, 0, 0), (0, 1, 0)], (1, 2, 2, 1, 2)),
        (Layout(tp=2, etp=1, sequence_parallel=True), [(0, 0, 0), (0, 0, 1)], (1, 1, 1, 2, 1)),
        (Layout(tp=2, dp=2, ep=2), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)], (2, 2, 4, 1, 2)),
    ],
    ids=str,
)
def test_places_of_experts(layout: Layout, ranks: list[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
    assert run_world(_experts_place, layout) == [(*rank, *sizes) for rank in ranks]
