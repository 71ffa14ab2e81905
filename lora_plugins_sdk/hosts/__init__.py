"""Hosts: what makes a megatron-core model run where Transformer Engine or CUDA is missing.

`cpu_shim` lifts megatron-core's CUDA assumptions; `torch_backend` offers Transformer Engine's module tree in pure
torch; `initialize` starts the parallel groups; `gpt` builds a GPTModel; `hf_fields`, `sizes` and `experts` check
what can be built.
"""
