"""Level 0: what can be known without torch, a model or ranks."""
