"""Level 1: one process (a world of one rank) against transformers, PEFT and itself."""
