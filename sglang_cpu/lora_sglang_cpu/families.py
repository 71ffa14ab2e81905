"""All hooks: one module for what every model needs, one for each family of layers that calls a GPU kernel."""

from __future__ import annotations

from lora_sglang_cpu import (
    base,
    gated_delta_net,
    head_lora,
    inkling,
    inkling_experts,
    moe_lora,
    request_seeds,
    widths,
)
from lora_sglang_cpu.hook import Hook, register

HOOKS: tuple[Hook, ...] = (
    *request_seeds.HOOKS,
    *widths.HOOKS,
    *head_lora.HOOKS,
    *moe_lora.HOOKS,
    *gated_delta_net.HOOKS,
    *inkling.HOOKS,
    *inkling_experts.HOOKS,
)


def install() -> None:
    """Check every hook against the installed SGLang, then patch this process.

    Raises:
        UnsupportedSGLang: A hooked function is gone or has changed; nothing was patched.
    """
    inkling.make_importable()
    register(HOOKS)
    base.install()
    gated_delta_net.keep_convolution_state_exact()
