"""A Qwen3 with scaled rotary frequencies on the real SGLang, on the CPU: beyond the length it was trained on, against
transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import raw_engine
import transformers_reference
from own_process import OwnProcess

pytestmark = pytest.mark.slow

TRAINED_ON = 16
PROMPTS = [[(7 * step + 3) % 320 for step in range(90)], [9, 10, 11]]
TOLERANCE = 1e-5
SCALING: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("kind", SCALING)
def test_scaled_frequencies(kind: str, reference: OwnProcess, running_engine: Callable, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": TRAINED_ON, **SCALING[kind]}
    models = {"scaled": {"rope_parameters": rope, "max_position_embeddings": 8 * TRAINED_ON}, "plain": {}}
    for name, fields in models.items():
        reference.run(transformers_reference.make_qwen3, str(tmp_path / name), **fields)
    scaled, adapter = tmp_path / "scaled", str(tmp_path / "adapter")
    reference.run(transformers_reference.make_peft_adapter, str(scaled), adapter)

    def gap(answer: raw_engine.Answer, model: str, adapter: str | None) -> float:
        expected = reference.run(transformers_reference.token_logprobs, str(tmp_path / model), [answer.tokens], adapter)
        return raw_engine.largest_gap([answer], expected)

    with running_engine(scaled, **raw_engine.LORA_ARGUMENTS) as engine:
        assert engine.run(raw_engine.load_adapter, "adapter", adapter) is None
        for name, folder in ((None, None), ("adapter", adapter)):
            long, short = engine.run(raw_engine.generate, PROMPTS, [name] * len(PROMPTS))
            assert gap(long, "scaled", folder) <= TOLERANCE and gap(short, "scaled", folder) <= TOLERANCE
            assert gap(long, "plain", folder) > 100 * TOLERANCE, "without the scaling it is another model"
