"""LoRA plugin for Inkling."""
