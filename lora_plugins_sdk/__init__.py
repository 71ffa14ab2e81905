"""LoRA for models on Megatron-core: one declaration per projection, everything else derived."""
