"""What transformers and PEFT say about a model and its adapter. Run these in a process that never imports SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

QWEN3_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")


def make_qwen3(folder: str, seed: int = 0, **fields: Any) -> None:
    """A dense Qwen3 with random fp32 weights, without a tokenizer: 3 layers, width 64, 320 tokens, untied head.

    Args:
        folder: Where to save it.
        seed: Of the weights.
        fields: Config fields instead of the small ones.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,  # large enough that logits differ by whole units
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**{**small, **fields})).float().save_pretrained(folder)


def make_peft_adapter(
    model: str, folder: str, *, rank: int = 4, alpha: int = 8, seed: int = 1, targets: Sequence[str] = QWEN3_TARGETS
) -> None:
    """A PEFT adapter of `model` with random A and B (B is not zero, so it has an effect), saved in `folder`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets)))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder, save_embedding_layers=False)


def token_logprobs(model: str, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> list[list[float]]:
    """fp32 log-probabilities of tokens 1.. of each sequence given those before, with PEFT's `adapter` if given."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is not None:
        from peft import PeftModel

        net = PeftModel.from_pretrained(net, adapter).eval()
    return logprobs_of(net, sequences)


def logprobs_of(net: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of tokens 1.. of each sequence under this model, one sequence at a time, without a cache."""
    import torch

    found = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)])
        with torch.no_grad():
            scores = net(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(scores.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found
