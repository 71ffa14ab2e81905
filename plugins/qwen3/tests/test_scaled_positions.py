"""Scaled rotary positions against transformers, at lengths beyond those of the first training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_tiny import VOCABULARY, hf_model, make_checkpoint, positions
from torch import Tensor

from lora_plugins_sdk import load_base_weights, load_plugin, read_hf_config
from lora_plugins_sdk.hosts.context_parallel import zigzag_positions
from lora_plugins_sdk.testing import Layout, current_run, run_world

TOLERANCE = 1e-5
FIRST_LENGTH, TOKENS = 16, 96
ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn, attention_factor": {"factor": 4.0, "attention_factor": 1.4, "beta_fast": 4.0},
}
CASES = [
    ("llama3", Layout()),
    ("llama3", Layout(tp=2, sequence_parallel=True)),
    ("llama3", Layout(pp=2)),
    ("yarn", Layout()),
    ("yarn, attention_factor", Layout()),
    ("yarn, attention_factor", Layout(cp=2)),
]


def _checkpoint(directory: Path, name: str) -> Path:
    rope = {"rope_type": name.partition(",")[0], "rope_theta": 10000.0, **ROPE[name]}
    rope["original_max_position_embeddings"] = FIRST_LENGTH
    return make_checkpoint(directory, max_position_embeddings=4 * FIRST_LENGTH, rope_parameters=rope)


def _logits(directory: Path, tokens: Tensor) -> Tensor | None:
    """This rank's logits, `[b, s / cp, columns / tp]` on the last stage."""
    from megatron.core.parallel_state import get_context_parallel_rank
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, plugin = current_run(), load_plugin("qwen3")
    model = plugin.build_model(read_hf_config(directory), run, torch.float32)
    load_base_weights(model, plugin, directory, run)
    kept: list[Tensor] = []
    mine = tokens[:, zigzag_positions(TOKENS, get_context_parallel_rank(), run.facts.cp)]

    def forward(data: Any, stage: Any) -> tuple[Tensor, Any]:
        ids = next(data)
        return stage(ids, positions(ids), None), lambda logits: (kept.append(logits.detach()) or logits.sum(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([mine]),
            model=[model],
            num_microbatches=1,
            seq_length=mine.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
        )
    return kept[0] if kept else None


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda one: str(one))
def test_logits_equal_transformers(tmp_path: Path, name: str, layout: Layout) -> None:
    directory = _checkpoint(tmp_path, name)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf_model(directory)(tokens).logits
    ranks = [rank for rank in run_world(_logits, layout, directory, tokens) if rank is not None]
    if layout.cp > 1:
        logits = torch.empty_like(expected)
        for rank, part in enumerate(ranks):
            logits[:, zigzag_positions(TOKENS, rank, layout.cp)] = part[..., :VOCABULARY]
    else:
        logits = torch.cat(ranks, dim=-1)
    assert (logits[..., :VOCABULARY] - expected).abs().max() <= TOLERANCE
    plain = _plain_logits(directory, tokens)
    assert (plain - expected).abs().max() > 100 * TOLERANCE, "the scaling matters for this model"


def _plain_logits(directory: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(directory)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens).logits
