"""No false alarm on a right plugin, whatever the seed; the GPU level's process and comparison on this machine."""

import pytest

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.testing.conformance import Context, Level, Status, Subject, cases, run_case
from lora_plugins_sdk.testing.conformance.device.alone import run_alone
from lora_plugins_sdk.testing.conformance.device.cuda import compare_with_cpu, on_device
from lora_plugins_sdk.testing.conformance.expectation import expectation_of

LAYOUTS = ("tp2+sp", "cp2")


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102])
def test_no_false_alarm(seed: int) -> None:
    """`Subject.seed` draws base weights, adapter, batch and upstream gradient anew."""
    context = Context(Subject.of("qwen3", seed=seed))
    wanted = [*cases(Level.SINGLE), *(case for case in cases(Level.PARALLEL) if str(case.layout) in LAYOUTS)]
    results = [run_case(context, case) for case in wanted]
    assert [(one.case.id, one.findings) for one in results if one.status is not Status.PASSED] == []
    plans = context.subject.table(RunFacts()).plans
    every = {plan.host_module for plan in plans}
    with_gradient = {plan.host_module for plan in plans if not plan.site.embedding}  # ids have none
    whole = [one for one in results if one.case.id != "pinned"]  # which holds some projections only
    partial = {
        one.case.id: sorted(every ^ one.sites)
        for one in whole
        if one.sites != (with_gradient if one.case.check.name == "input-gradients" else every)
    }
    assert not partial, "each of these checks measures every site"


@pytest.mark.slow
def test_the_process_of_the_gpu_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU that process computes on the CPU, and must then give the very values of a test world's rank."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as ranks have it: more threads sum in another order
    context = Context(Subject.of("qwen3"))
    seen = on_device(context)
    assert list(compare_with_cpu(context, expectation_of(context, seen), bound=0.0)) == []
    assert set(seen.linears.values()) == {
        "lora_plugins_sdk.hosts.norm_linear.TorchLayerNormColumnParallelLinear",
        "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
        "megatron.core.tensor_parallel.layers.RowParallelLinear",
        "megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
    }


def _fail() -> None:
    raise KeyError("no such kernel")


def test_an_error_in_that_process_is_told() -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        run_alone(_fail, timeout=120)
