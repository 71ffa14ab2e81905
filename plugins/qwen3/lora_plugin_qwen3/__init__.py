"""LoRA plugin for Qwen3."""
