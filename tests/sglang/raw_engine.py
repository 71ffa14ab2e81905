"""SGLang's own `Engine`, without anything of the harness. Run these in a process of the engine's own (`OwnProcess`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# What a CPU needs (docs/sglang.md). 2048 tokens of key-value cache instead of half the machine's memory.
CPU_ARGUMENTS: dict[str, Any] = dict(
    device="cpu",
    attention_backend="torch_native",
    sampling_backend="pytorch",
    disable_cuda_graph=True,
    dtype="float32",
    max_total_tokens=2048,
    max_running_requests=16,
    skip_tokenizer_init=True,
    sleep_on_idle=True,  # an idle scheduler would otherwise keep a core busy
    log_level="error",
)
LORA_ARGUMENTS: dict[str, Any] = dict(
    enable_lora=True, lora_backend="torch_native", max_lora_rank=8, lora_target_modules=["all"], max_loras_per_batch=3
)
# Layers with a recurrent state: no prefix cache, and room for the states of few requests instead of thousands.
HYBRID_ARGUMENTS: dict[str, Any] = dict(disable_radix_cache=True, max_mamba_cache_size=32, max_running_requests=8)
# Inkling has states too, and its prefix cache keeps some: five a request. Its sliding layers have a cache of their own.
INKLING_ARGUMENTS: dict[str, Any] = dict(max_mamba_cache_size=40, max_running_requests=8, swa_full_tokens_ratio=1.0)

_engine: Any = None


@dataclass(frozen=True)
class Answer:
    """One sequence of the engine with the log-probability of each token after the first.

    Attributes:
        tokens: Prompt and output.
        prompt_logprobs: Of prompt tokens 1.., by prefill.
        output_logprobs: Of the output tokens, the first by prefill, the rest by decode.
    """

    tokens: list[int]
    prompt_logprobs: list[float]
    output_logprobs: list[float]

    @property
    def logprobs(self) -> list[float]:
        """Of tokens 1.., in the order of `token_logprobs`."""
        return self.prompt_logprobs + self.output_logprobs


def start(model: str, **arguments: Any) -> None:
    """Start this process's engine with `CPU_ARGUMENTS` overlaid by `arguments`."""
    global _engine
    import sglang

    assert _engine is None, "one engine a process"
    _engine = sglang.Engine(model_path=model, **{**CPU_ARGUMENTS, **arguments})


def stop() -> None:
    """End the engine and its processes."""
    global _engine
    _engine.shutdown()
    _engine = None


def generate(
    prompts: Sequence[Sequence[int]], adapters: Sequence[str | None] | None = None, new_tokens: int = 6
) -> list[Answer]:
    """Greedy continuation of each prompt, all in one batch, each with its own adapter."""
    lora = {} if adapters is None else {"lora_path": list(adapters)}
    found = _engine.generate(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        **lora,
    )
    return [
        Answer(
            tokens=[*prompt, *answer["output_ids"]],
            prompt_logprobs=[row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]],
            output_logprobs=[row[0] for row in answer["meta_info"]["output_token_logprobs"]],
        )
        for prompt, answer in zip(prompts, found, strict=True)
    ]


@dataclass(frozen=True)
class Continued:
    """A greedy continuation.

    Attributes:
        tokens: Prompt and output.
        output_logprobs: Of the output tokens.
        cached: Tokens of the prompt whose keys and states came from the prefix cache.
    """

    tokens: list[int]
    output_logprobs: list[float]
    cached: int


def continue_prompt(prompt: Sequence[int], adapter: str | None, new_tokens: int) -> Continued:
    """Greedy continuation of one prompt; unlike `generate` it asks nothing of the prompt, which may be cached then."""
    answer = _engine.generate(
        input_ids=list(prompt),
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        lora_path=adapter,
    )
    found = answer["meta_info"]
    logprobs = [row[0] for row in found["output_token_logprobs"]]
    return Continued([*prompt, *answer["output_ids"]], logprobs, found["cached_tokens"])


def largest_gap(answers: Sequence[Answer], expected: Sequence[Sequence[float]]) -> float:
    """Largest difference between the engine's log-probabilities and the expected ones, prompt and output tokens."""
    return max(
        abs(a - b)
        for answer, row in zip(answers, expected, strict=True)
        for a, b in zip(answer.logprobs, row, strict=True)
    )


def load_adapter(name: str, folder: str) -> str | None:
    """Load a PEFT directory from disk; the engine's reason if it refuses."""
    result = _engine.load_lora_adapter(name, folder)
    return None if result.success else result.error_message


def load_adapter_in_memory(name: str, folder: str) -> str | None:
    """Load a PEFT directory through tensors in memory; the engine's reason if it refuses."""
    import json
    from pathlib import Path

    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    result = _engine.load_lora_adapter_from_tensors(name, tensors, config)
    return None if result.success else result.error_message
