"""A world's ranks: what they return, what they find set up, and that they are used again."""

from __future__ import annotations

import importlib.util
import os
import pickletools
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing import Layout, close_pool, current_layout, current_run, run_world
from lora_plugins_sdk.testing.rank import MOST_THREADS
from lora_plugins_sdk.testing.transport import dump_result

pytestmark = [pytest.mark.world, pytest.mark.mcore_matrix]


def sum_over_groups(scale: float, *, offset: int) -> dict[str, object]:
    run = current_run()
    mine = torch.full((2,), scale * (dist.get_rank() + offset))
    sums = {}
    for name in ("tp", "pp", "dp"):
        sums[name] = mine.clone()
        dist.all_reduce(sums[name], group=getattr(run, f"{name}_group"))
    return {"rank": dist.get_rank(), "facts": run.facts, **sums}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), {"tp": [1], "pp": [1], "dp": [1]}),
        (Layout(tp=2, sequence_parallel=True), {"tp": [3, 3], "pp": [1, 2], "dp": [1, 2]}),
        (Layout(tp=2, pp=2), {"tp": [3, 3, 7, 7], "pp": [4, 6, 4, 6], "dp": [1, 2, 3, 4]}),
        (Layout(tp=2, dp=2), {"tp": [3, 3, 7, 7], "pp": [1, 2, 3, 4], "dp": [4, 6, 4, 6]}),
    ],
    ids=str,
)
def test_results_in_rank_order_from_live_groups(layout: Layout, expected: dict[str, list[int]]) -> None:
    results = run_world(sum_over_groups, layout, 0.5, offset=1)
    assert [result["rank"] for result in results] == list(range(layout.world_size))
    for name, sums in expected.items():
        assert [result[name].tolist() for result in results] == [[one / 2, one / 2] for one in sums]
    facts = RunFacts(tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, sequence_parallel=layout.sequence_parallel)
    assert all(result["facts"] == facts for result in results)


def pid_and_traces_of_an_earlier_case() -> tuple[int, object, str]:
    traces = (torch.get_default_dtype(), torch.is_grad_enabled(), os.environ.get("LEFT_BEHIND"))
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid(), traces, str(current_layout())


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_rank_that_keeps_many_threads_is_replaced() -> None:
    """As those of process groups that a model's leftovers keep alive: hundreds slow every later case down."""
    close_pool()  # ranks of cases before have threads of their own
    few, many = run_world(leave_threads, Layout(), 5), run_world(leave_threads, Layout(), MOST_THREADS)
    after = run_world(leave_threads, Layout(), 0)
    assert few == many and after != many


def test_ranks_are_reused_and_clean() -> None:
    close_pool()  # ranks of cases before may be due to be replaced
    layouts = [Layout(tp=2), Layout(pp=2), Layout(dp=2)]
    cases = [run_world(pid_and_traces_of_an_earlier_case, layout) for layout in layouts]
    pids = [[pid for pid, _, _ in case] for case in cases]
    assert pids[0] == pids[1] == pids[2] and len(set(pids[0])) == 2
    assert os.getpid() not in pids[0]
    assert {traces for case in cases for _, traces, _ in case} == {(torch.float32, True, None)}
    assert [name for case in cases for _, _, name in case] == ["tp2", "tp2", "pp2", "pp2", "dp2", "dp2"]


def surroundings() -> dict[str, object]:
    return {
        "seeded": torch.rand(4),
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "launch": sorted(key for key in os.environ if key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        "variable": os.environ.get("SET_BY_THE_TEST"),
        "folder": Path.cwd(),
    }


def test_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = run_world(surroundings, Layout(dp=2))
    for key, value in {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "RANK": "7", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    second = run_world(surroundings, Layout(dp=2))
    assert [one["seeded"].tolist() for one in first + second] == [first[0]["seeded"].tolist()] * 4
    assert all(one["threads"] == 1 and one["omp"] == "1" and one["launch"] == [] for one in first + second)
    assert [one["variable"] for one in first + second] == [None, None, "yes", "yes"]
    assert [one["folder"] for one in second] == [tmp_path, tmp_path]
    assert os.environ["MASTER_ADDR"] == "elsewhere"


def double(values: torch.Tensor) -> dict[str, object]:
    twice = torch.nn.Parameter(values * 2)
    return {"twice": twice, "again": [twice], "view": (twice + 0)[1:3], "bf16": twice.bfloat16()[::2]}


def test_large_tensors_both_ways() -> None:
    values = torch.arange(4_000_000, dtype=torch.float32)
    for result in run_world(double, Layout(tp=2), values):
        assert torch.equal(result["twice"], values * 2) and result["twice"].requires_grad
        assert result["again"][0] is result["twice"]
        assert result["view"].tolist() == [2, 4] and result["view"].untyped_storage().nbytes() == 8
        assert torch.equal(result["bf16"], values[::2].bfloat16() * 2)


def names_in_a_pickled_tensor() -> set[str]:
    return {name for _, name, _ in pickletools.genops(dump_result(torch.ones(2))) if isinstance(name, str)}


def test_results_are_read_without_megatron() -> None:
    """megatron-core 0.19 replaces the function that plain pickle loads tensors with by its own."""
    (names,) = run_world(names_in_a_pickled_tensor, Layout())
    assert "load_tensor" in names and not any(name.startswith("megatron") for name in names)


def speak() -> None:
    print("from", dist.get_rank())


def test_output_is_shown_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_world(speak, Layout(tp=2))
    assert capsys.readouterr().out == "[rank 0] from 0\n[rank 1] from 1\n"


@pytest.mark.parametrize("name", ["case_elsewhere", "folder.nested.case_elsewhere"])
def test_function_of_a_file_off_the_import_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test files of pytest's importlib mode are such; so is a second file with a name already taken."""
    for content in ("one", "two"):
        file = tmp_path / content / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True)
        file.write_text(
            f"class Value:\n    text = {content!r}\n\n\n"
            "def get(value):\n    return type(value).__module__, value.text\n"
        )
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        for parent in ("folder", "folder.nested"):  # as pytest does, for pickle to find the module
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert run_world(module.get, Layout(), module.Value()) == [(name, content)]
