"""Whether this process of SGLang gets the CPU hooks."""

from __future__ import annotations

import os

from lora_sglang_cpu.errors import CannotActivate

SWITCH = "LORA_SGLANG_CPU"


def wanted() -> bool:
    """Whether to install the hooks: on by itself where SGLang found no device, off where it found one.

    The environment variable `LORA_SGLANG_CPU` overrules: `0` keeps the hooks out, `1` makes their absence an error.

    Raises:
        CannotActivate: The variable is `1` and SGLang runs on a device (it would call that device's kernels whatever
            `device="cpu"` says), or the variable is neither `0`, `1` nor empty.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise CannotActivate(
            f"{SWITCH}={switch!r} is not understood. Set it to 1 or 0, or unset it to let the machine decide."
        )
    if switch == "0":
        return False
    device = sglang_device()
    if device is not None and switch == "1":
        raise CannotActivate(
            f"{SWITCH}=1 asks for SGLang on the CPU, but SGLang runs on {device} here and would call its kernels. "
            f"Hide the device (for CUDA: CUDA_VISIBLE_DEVICES=''; for SGLang's own CPU engine: "
            f"unset SGLANG_USE_CPU_ENGINE), or unset {SWITCH}."
        )
    return device is None


def sglang_device() -> str | None:
    """The platform that SGLang chose for this machine, or None where it found none and is left without kernels."""
    import torch
    from sglang.srt.platforms import current_platform  # resolved by SGLang on first access
    from sglang.srt.platforms.interface import SRTPlatform

    if type(current_platform) is not SRTPlatform:
        return type(current_platform).__name__
    # SGLang's list of platforms has gaps (Gaudi, for one) that torch's has not.
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type
