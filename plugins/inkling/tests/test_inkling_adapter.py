"""Adapters on every projection: the merged checkpoint is the adapter applied, and files come back as they were."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG, save_checkpoint, tokens
from torch import Tensor

from lora_plugin_inkling import ARCHITECTURE
from lora_plugin_inkling.official import OFFICIAL
from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    attach,
    export_adapter,
    import_adapter,
    load_base_weights,
    load_plugin,
    module_names,
    write_adapter,
)
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.testing import Layout, current_run, run_world

VOCABULARY = CONFIG["unpadded_vocab_size"]
TARGETS = ("all-linear", "embed_tokens", "lm_head")
SPLIT = Layout(tp=2, ep=2, etp=1, sequence_parallel=True)
# The third pads the vocabulary as Megatron-LM does: its last rank has no row of the head at all.
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, sequence_parallel=True, make_vocab_size_divisible_by=64),
    SPLIT,
    Layout(pp=2),
]
MODULES = module_names(ARCHITECTURE, CONFIG)
HEAD = "base_model.model.lm_head.lora_B.weight"


def lora(sharing: str) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8, target_modules=TARGETS, expert_sharing=sharing)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("inkling"))


@pytest.fixture(scope="module", params=["none", "outer"])
def sharing(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def adapter(base: Path, sharing: str) -> PeftAdapter:
    """A random adapter, both factors of every pair away from zero."""
    ((fresh, _),) = run_world(_export_and_logits, Layout(), base, sharing, None)
    tensors = {}
    for name, tensor in fresh.tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.2
    return replace(fresh, tensors=tensors)


def _export_and_logits(base: Path, sharing: str, saved: PeftAdapter | None) -> tuple[PeftAdapter, Tensor | None]:
    """This rank's logits through megatron-core's schedule, and the export of what was imported."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, plugin = current_run(), load_plugin("inkling_text")
    overrides = {"variable_seq_lengths": True} if run.facts.pp > 1 else {}
    model = plugin.build_model(CONFIG, run, torch.float32, overrides)
    load_base_weights(model, plugin, base, run)
    attach(model, plugin, CONFIG, lora(sharing), run)
    if saved is not None:
        import_adapter(model, saved)
    seen: list[Tensor] = []

    def forward(data: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append(logits.detach().clone())
            return logits.sum(), {}

        return stage(next(data), None, None), loss

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([tokens()]),
            model=[model],
            num_microbatches=1,
            seq_length=tokens().shape[1],
            micro_batch_size=tokens().shape[0],
            forward_only=True,
        )
    exported = export_adapter(model)
    cloned = {name: tensor.clone() for name, tensor in exported.tensors.items()}
    return PeftAdapter(tensors=cloned, config=exported.config), seen[0] if seen else None


@pytest.fixture(scope="module")
def merged_logits(base: Path, adapter: PeftAdapter, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """What transformers computes from a checkpoint into which the adapter was merged offline."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("merged")
    merge(plan_merge(base, write_adapter(adapter, place / "adapter"), place / "base"))
    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
        assert (logits - plain(tokens()).logits).abs().max() > 0.1, "the adapter must matter"
    return logits


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_adapter_is_the_merged_checkpoint(
    layout: Layout,
    base: Path,
    sharing: str,
    adapter: PeftAdapter,
    merged_logits: Tensor,
    figure: Callable[[str, float], None],
) -> None:
    """B42, I5: with the head, whose last rank is padded; what it exports is what it was given."""
    ranks = run_world(_export_and_logits, layout, base, sharing, adapter)
    shards = [shard for _, shard in ranks if shard is not None]
    logits, padding = torch.cat(shards, dim=-1).tensor_split([VOCABULARY], dim=-1)
    assert not padding.any(), "the padding of the output layer is zero"
    difference = (logits - merged_logits).abs().max().item()
    figure(f"{layout}, {sharing}: logits", difference)
    assert difference <= 1e-5
    for exported, _ in ranks:
        assert exported.tensors.keys() == adapter.tensors.keys()
        assert all(torch.equal(exported.tensors[name], tensor) for name, tensor in adapter.tensors.items())


SHAPES = {
    "layers.0.attn.wq_du": ((4, 40), (48, 4)),
    "layers.1.attn.wr_du": ((4, 40), (48, 4)),
    "layers.1.attn.wo_ud": ((4, 80), (40, 4)),
    "layers.0.mlp.w1": ((4, 40), (36, 4)),
    "layers.0.mlp.w2": ((4, 36), (40, 4)),
    "layers.1.mlp.experts.w3": ((1, 4, 40), (8, 28, 4)),
    "layers.1.mlp.experts.w2": ((8, 4, 28), (1, 40, 4)),
    "layers.1.mlp.shared_experts.w1": ((1, 4, 40), (2, 28, 4)),
    "layers.1.mlp.shared_experts.w2": ((2, 4, 28), (1, 40, 4)),
}


@pytest.fixture(scope="module")
def shared_outer(base: Path) -> PeftAdapter:
    ((exported, _),) = run_world(_export_and_logits, Layout(), base, "outer", None)
    tensors = {name: torch.randn_like(tensor) for name, tensor in exported.tensors.items()}
    return replace(exported, tensors=tensors)


@pytest.mark.world
def test_official_names_and_shapes(shared_outer: PeftAdapter) -> None:
    official = OFFICIAL.write(shared_outer, MODULES)
    assert OFFICIAL.read(shared_outer, MODULES) is shared_outer
    for module, shapes in SHAPES.items():
        stem = f"base_model.model.model.llm.{module}"
        assert tuple(tuple(official.tensors[f"{stem}.lora_{one}.weight"].shape) for one in "AB") == shapes
    assert official.config["target_modules"] == sorted(
        ["embed_tokens", "lm_head", "w1", "w2", "w3", "wk_dv", "wo_ud", "wq_du", "wr_du", "wv_dv"]
    )
    back = OFFICIAL.read(official, MODULES)
    assert back.config == shared_outer.config and back.tensors.keys() == shared_outer.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in shared_outer.tensors.items())


@pytest.mark.world
def test_factors_of_single_experts_have_no_official_name(base: Path) -> None:
    ((exported, _),) = run_world(_export_and_logits, Layout(), base, "none", None)
    with pytest.raises(LoraError, match=r"experts\.0\.\w+\.lora_A\.weight: has no name in the official schema"):
        OFFICIAL.write(exported, MODULES)


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(), SPLIT], ids=str)
def test_warm_start_from_the_official_schema(layout: Layout, base: Path, shared_outer: PeftAdapter) -> None:
    """B42: the head's rows for the padded vocabulary are dropped and padded again for the last rank; embedding and head
    under the names of the base's own files.
    """
    official = OFFICIAL.write(shared_outer, MODULES)
    padded = torch.cat([official.tensors[HEAD], torch.zeros(CONFIG["vocab_size"] - VOCABULARY, 4)])
    tensors = {
        name.replace(".embed_tokens.", ".model.llm.embed.").replace(".lm_head.", ".model.llm.unembed."): tensor
        for name, tensor in {**official.tensors, HEAD: padded}.items()
    }
    assert {f"base_model.model.model.llm.{one}" for one in ("embed.lora_embedding_A", "unembed.lora_B.weight")} < {
        *tensors
    }
    official = replace(official, tensors=tensors)
    for exported, _ in run_world(_export_and_logits, layout, base, "outer", official):
        assert exported.tensors.keys() == shared_outer.tensors.keys()
        assert all(torch.equal(exported.tensors[name], tensor) for name, tensor in shared_outer.tensors.items())
