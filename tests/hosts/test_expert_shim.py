"""What the CPU needs for experts and gated delta nets: with each line it runs, without any one of them it does not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hybrid_host import train_hybrid
from megatron.core import __version__ as megatron_version
from torch import Tensor

from lora_plugins_sdk.testing import Layout, WorldError, run_world

ONE, EP2 = Layout(), Layout(dp=2, ep=2)
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
EP2_ETP2 = Layout(tp=2, dp=2, ep=2, sequence_parallel=True)


@contextmanager
def stream() -> Iterator[None]:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    with (
        patch.object(torch.cuda, "Stream", torch.cuda.streams.Stream),
        patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None),
    ):
        yield


@contextmanager
def router_gemm() -> Iterator[None]:
    from megatron.core.transformer.moe import moe_utils

    del moe_utils.te_general_gemm
    try:
        yield
    finally:
        moe_utils.te_general_gemm = None


@contextmanager
def split_sizes() -> Iterator[None]:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", moe_utils.maybe_move_tensor_to_cpu):
        yield


@contextmanager
def uneven_gather() -> Iterator[None]:
    from megatron.core.tensor_parallel import mappings

    original = mappings._gather_along_first_dim.__wrapped__  # type: ignore[attr-defined]
    with patch.object(mappings, "_gather_along_first_dim", original):
        yield


@contextmanager
def delta_net_flag() -> Iterator[None]:
    with _delta_net("HAVE_FLA", False):
        yield


@contextmanager
def delta_net_norm() -> Iterator[None]:
    with _delta_net("l2norm", None):
        yield


@contextmanager
def fp8_switch() -> Iterator[None]:
    from megatron.core.tensor_parallel import random

    checkpoint = random.CheckpointWithoutOutput
    with patch.object(checkpoint, "__init__", checkpoint.__init__.__wrapped__):  # type: ignore[attr-defined]
        yield


@contextmanager
def eager_functions() -> Iterator[None]:
    """A method compiled as megatron-core has it, on a machine without a C++ compiler."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from torch._inductor import config

    machine = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    compiled = torch.compile(GatedDeltaNet._apply_gated_norm)
    with config.patch(machine), patch.object(GatedDeltaNet, "_apply_gated_norm", compiled):
        yield


@contextmanager
def _delta_net(name: str, value: object) -> Iterator[None]:
    from megatron.core.ssm import gated_delta_net

    from lora_plugins_sdk.hosts import torch_backend

    torch_backend.use_torch_delta_rule()
    module = getattr(gated_delta_net, "common", gated_delta_net)
    with patch.object(module, name, value), patch.object(torch_backend, "use_torch_delta_rule", lambda: None):
        yield


def train_without(removed: Callable[[], Iterator[None]] | None) -> int:
    """Number of functions that torch compiled meanwhile."""
    from torch._dynamo.utils import counters

    counters.clear()
    with ExitStack() as stack:
        if removed is not None:
            stack.enter_context(removed())  # type: ignore[arg-type]
        train_hybrid(**RECOMPUTE)
    return counters["frames"]["total"]


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", [ONE, EP2, EP2_ETP2], ids=str)
def test_it_trains_with_all_of_them(layout: Layout) -> None:
    """And without a C++ compiler."""
    assert run_world(train_without, layout, None) == [0] * layout.world_size


def gradient(overrides: dict[str, Any]) -> Tensor:
    return train_hybrid(**overrides)


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_recomputed_outputs_change_nothing() -> None:
    ((plain,), (recomputed,)) = (run_world(gradient, ONE, one) for one in ({}, RECOMPUTE))
    torch.testing.assert_close(recomputed, plain)


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize(
    ("removed", "layout", "words"),
    [
        (stream, ONE, "cuda|CUDA|NVIDIA"),
        (split_sizes, EP2, "Tensor|tensor|list|int"),
        (uneven_gather, EP2_ETP2, "invalid tensor size"),
        (fp8_switch, ONE, "FP8GlobalStateManager"),
        (delta_net_flag, ONE, "FLA is not installed|flash-linear-attention"),
        (delta_net_norm, ONE, "not callable"),
        (eager_functions, ONE, "No working C.. compiler found"),
    ],
)
def test_it_does_not_without(removed: Callable[[], Iterator[None]], layout: Layout, words: str) -> None:
    with pytest.raises(WorldError, match=words):
        run_world(train_without, layout, removed)


@pytest.mark.world
@pytest.mark.skipif(not megatron_version.startswith("0.16"), reason="0.19 defines the name itself")
def test_the_router_of_016_needs_a_name_of_transformer_engine() -> None:
    with pytest.raises(WorldError, match="te_general_gemm"):
        run_world(train_without, ONE, router_gemm)
