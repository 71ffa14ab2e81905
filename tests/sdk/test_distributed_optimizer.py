"""megatron-core's distributed optimizer with an adapter attached, in checkpoints from one layout to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lora_plugins_sdk import LoraConfig, attach, export_adapter, gather_adam_moments, import_adapter, load_plugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

pytestmark = pytest.mark.world

LORA = LoraConfig(rank=4, alpha=8)
Whole = dict[str, Tensor]


class TorchOnCpu(ModuleType):
    """`torch` as megatron-core's optimizers see it: `device="cuda"` in `torch.tensor` means the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, device: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) that counts steps by group, as Transformer Engine's and Apex' do.

    With torch's, megatron-core writes a checkpoint that it cannot read itself.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for moment, power, beta in zip(("exp_avg", "exp_avg_sq"), (1, 2), group["betas"], strict=True):
                    mean = state.setdefault(moment, torch.zeros_like(parameter))
                    mean.mul_(beta).add_(parameter.grad**power, alpha=1 - beta)
                first, second = (1 - beta ** group["step"] for beta in group["betas"])
                scale = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / first)


@contextmanager
def optimizers_on_a_cpu() -> Iterator[None]:
    """Lift what in megatron-core's optimizers assumes a GPU; the gradient's norm is only reported, as nothing is
    clipped."""
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer, optimizer

    patches = [
        mock.patch.multiple(optimizers, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True),
        mock.patch.object(optimizer, "torch", TorchOnCpu("torch")),
        mock.patch.object(optimizer.ChainedOptimizer, "get_grad_norm", lambda self: 0.0),
        mock.patch.object(nn.Parameter, "type", lambda self: "torch.cuda.FloatTensor", create=True),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class Trainer:
    """An adapted model in DistributedDataParallel with megatron-core's optimizer, as a host trainer has them.

    Args:
        architecture: name of a plugin's; the model is its tiny one.
        sharding: megatron-core's name of the form in which the optimizer's state is saved.
    """

    def __init__(self, architecture: str, sharding: str) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        plugin, run = load_plugin(architecture=architecture), current_run()
        hf_config = dict(plugin.architecture.tiny_config)
        self.model = plugin.build_model(hf_config, run, torch.float32)
        self.adapter = attach(self.model, plugin, hf_config, LORA, run)
        host: Any = self.model.config
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.chunk = DistributedDataParallel(host, settings, self.model)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)
        self.optimizer: Any = get_megatron_optimizer(config, [self.chunk], use_gloo_process_groups=False)
        self._metadata = {"distrib_optim_sharding_type": sharding}

    def randomize(self) -> None:
        """Factors in which no two rows are alike, the same under every layout."""
        whole = export_adapter(self.model)
        values = {
            name: torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
            for number, (name, one) in enumerate(sorted(whole.tensors.items()))
        }
        import_adapter(self.model, replace(whole, tensors=values))

    def step(self) -> None:
        """A step whose gradients are the same under every layout: functions of the factors."""
        self.chunk.zero_grad_buffer()
        for parameter in self.adapter.parameters():
            parameter.main_grad.copy_(parameter.detach() * 0.5 + 0.125)  # type: ignore[attr-defined]
        self.chunk.finish_grad_sync()
        self.optimizer.step()

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """The factors, out of the whole model's state, and the optimizer's: the base is loaded from its own files."""
        model: Any = self.model
        state = {name: one for name, one in model.sharded_state_dict().items() if ".lora." in name}
        optimizer = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=self._metadata)
        return {"model": state, "optimizer": optimizer}

    def load(self, directory: Path) -> None:
        from megatron.core import dist_checkpointing

        loaded: Any = dist_checkpointing.load(self.sharded(is_loading=True), str(directory))
        self.model.load_state_dict(loaded["model"], strict=False)
        # megatron-core's dp_reshardable writes into fp32 parameters without saying so itself.
        with torch.no_grad():
            self.optimizer.load_state_dict(loaded["optimizer"])

    def whole(self) -> Whole:
        """Every factor and its two moments, by Hugging Face names."""
        plain = torch.optim.AdamW(self.adapter.parameters())
        for one in self.optimizer.chained_optimizers:
            world = one.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            for number, buffer in enumerate(one.buffers):
                [moments] = [value for key, value in world[number].items() if isinstance(key, tuple)]
                for parameter, (start, end, _) in buffer.param_index_map.items():
                    for name in ("exp_avg", "exp_avg_sq"):
                        plain.state[parameter][name] = moments[name][start:end].view(parameter.shape)
        return {**export_adapter(self.model).tensors, **gather_adam_moments(self.adapter, plain)}


def save(architecture: str, directory: Path, sharding: str) -> tuple[Whole, Whole]:
    """Two steps and a checkpoint, then one more step: all that is whole then, and at the end."""
    from megatron.core import dist_checkpointing

    with optimizers_on_a_cpu():
        trainer = Trainer(architecture, sharding)
        trainer.randomize()
        trainer.step()
        trainer.step()
        dist_checkpointing.save(trainer.sharded(is_loading=False), str(directory))
        saved = trainer.whole()
        trainer.step()
        return saved, trainer.whole()


def resume(architecture: str, directory: Path, sharding: str) -> tuple[Whole, Whole]:
    """The same from the checkpoint, into a fresh adapter."""
    with optimizers_on_a_cpu():
        trainer = Trainer(architecture, sharding)
        trainer.load(directory)
        loaded = trainer.whole()
        trainer.step()
        return loaded, trainer.whole()


@pytest.mark.parametrize(
    ("architecture", "sharding", "source", "targets"),
    [
        ("qwen3", "fully_reshardable", Layout(tp=2), (Layout(), Layout(tp=2), Layout(dp=2))),
        ("qwen3", "fully_reshardable", Layout(dp=2), (Layout(), Layout(tp=2))),
        ("qwen3", "dp_reshardable", Layout(dp=2), (Layout(), Layout(dp=2))),
        ("qwen36_moe", "fully_reshardable", Layout(tp=2, sequence_parallel=True), (Layout(), Layout(dp=2))),
        ("qwen36_moe", "fully_reshardable", Layout(dp=2, ep=2), (Layout(dp=2, ep=2),)),
    ],
    ids=str,
)
def test_factors_and_moments_come_back_under_another_layout(
    architecture: str, sharding: str, source: Layout, targets: tuple[Layout, ...], tmp_path: Path
) -> None:
    """B16, B18: bit for bit, and the step after is the one that the run would have made."""
    directory = tmp_path / "saved"
    directory.mkdir()
    expected = run_world(save, source, architecture, directory, sharding)[0]
    for target in targets:
        for found in run_world(resume, target, architecture, directory, sharding):
            for when, then, now in zip(("loaded", "after a step"), expected, found, strict=True):
                assert now.keys() == then.keys()
                wrong = {name: (now[name] - one).abs().max() for name, one in then.items() if not now[name].equal(one)}
                assert not wrong, (
                    f"from {source} to {target}, {when}: {len(wrong)} of {len(now)}: {[*wrong.items()][:3]}"
                )
