"""Level 3: on the accelerator of this machine."""
