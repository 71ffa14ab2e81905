"""The policy on megatron-core: log-probabilities, optimizer updates, the adapter's export."""

from lora_harness.trainer.policy import MegatronPolicy, UpdateReport

__all__ = ["MegatronPolicy", "UpdateReport"]
