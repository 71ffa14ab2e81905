"""Inkling on megatron-core, which does not have it: modules of its own, from the mathematics up.

`fields` reads the HF config, `build` makes one rank's stage. A layer is attention (`attention`, `relative_bias`) and an
MLP (`dense_mlp`, or `moe` with `router` and `shared_experts`), each followed by a short convolution (`short_conv`).
"""
