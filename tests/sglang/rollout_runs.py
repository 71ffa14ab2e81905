"""Configs, exports and requests for tests of the harness's SGLang engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sync_engines import PROMPTS, random_adapter

from lora_harness.config import TrainConfig, parse_config
from lora_harness.engines import Completion, GenerationRequest, SamplingParams
from lora_harness.engines.sglang.engine import SglangEngine
from lora_harness.engines.sglang.opening import open_sglang
from lora_harness.engines.sglang.server import SglangServer
from lora_plugins_sdk import PeftAdapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def run_config(model: Path, output: Path, **rollout: Any) -> TrainConfig:
    """The config of a run on SGLang; only its model, output, seed and rollout count here."""
    return parse_config(
        {
            "model": {"path": str(model)},
            "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
            "steps": 1,
            "output": str(output),
            "lora": {"rank": 4, "alpha": 8.0},
            "rollout": {"engine": "sglang", "max_batch_size": 16, **rollout},
        }
    )


def opened(config: TrainConfig, said: list[str] | None = None) -> SglangEngine:
    """The engine of a run whose adapter has every linear of the layers."""
    return open_sglang(config, policy(config.model.path, 0), say=(said if said is not None else []).append)


def servers_of(engine: SglangEngine) -> list[SglangServer]:
    return [client._server for client in engine._group.clients]  # type: ignore[attr-defined]


def policy(model: Path, seed: int) -> PeftAdapter:
    """A random adapter of rank 4 on every linear of the layers."""
    return random_adapter(model, seed, targets=TARGETS)


def requests(
    *,
    temperature: float = 1.0,
    stops: Sequence[int] = (),
    new_tokens: int = 8,
    samples: int = 2,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[GenerationRequest]:
    """`samples` requests for each prompt, each with its own seed."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, stop_token_ids=frozenset(stops))
    return [
        GenerationRequest(prompt_ids=tuple(prompt), sampling=sampling, seed=1000 * number + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def gap(asked: Sequence[GenerationRequest], drawn: Sequence[Completion], expected: Sequence[Sequence[float]]) -> float:
    """Largest difference between the completions' log-probabilities and those of a reference.

    Args:
        asked, drawn: requests and completions.
        expected: log-probabilities of tokens 1.. of prompt and completion.
    """
    worst = 0.0
    for request, one, reference in zip(asked, drawn, expected, strict=True):
        mine = reference[len(request.prompt_ids) - 1 :]
        assert len(mine) == len(one.logprobs) > 0
        worst = max(worst, *(abs(a - b) for a, b in zip(mine, one.logprobs, strict=True)))
    return worst


def sequences(asked: Sequence[GenerationRequest], drawn: Sequence[Completion]) -> list[list[int]]:
    """Prompts with their completions."""
    return [[*request.prompt_ids, *one.token_ids] for request, one in zip(asked, drawn, strict=True)]
