"""What transformers says of completions. Run these in a process that never imports SGLang (`OwnProcess`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def tempered_logprobs(
    model: str, sequences: Sequence[Sequence[int]], temperature: float, adapter: str | None = None
) -> list[list[float]]:
    """fp32 log-probabilities of tokens 1.. of each sequence under softmax(logits / temperature)."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is not None:
        from peft import PeftModel

        net = PeftModel.from_pretrained(net, adapter).eval()
    found = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)])
        with torch.no_grad():
            logits = net(input_ids=ids, use_cache=False).logits[0, :-1].float()
        scores = (logits / temperature).log_softmax(-1)
        found.append(scores.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


def local_greedy(
    model: str, prompts: Sequence[Sequence[int]], new_tokens: int, adapter: str | None = None
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities of the local engine's greedy completions."""
    from lora_harness.engines.base import GenerationRequest, SamplingParams
    from lora_harness.engines.local import LocalEngine
    from lora_plugins_sdk import read_adapter

    engine = LocalEngine(Path(model))
    if adapter is not None:
        given = read_adapter(Path(adapter))
        engine.publish(1, given.tensors, given.config)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    drawn = engine.generate([GenerationRequest(prompt_ids=tuple(one), sampling=sampling) for one in prompts])
    return [(one.token_ids, one.logprobs) for one in drawn]
