"""GRPO with LoRA adapters on any registered model plugin."""
