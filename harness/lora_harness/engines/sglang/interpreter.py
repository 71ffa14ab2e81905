"""Whether the interpreter that engines are to run in has SGLang. Asked before any base is made or loaded. No torch."""

from __future__ import annotations

import subprocess
import sys

from lora_harness.config.rollout import SglangSection
from lora_harness.engines.sglang import probe
from lora_plugins_sdk.errors import LoraError

_SECONDS = 120.0


def refuse_without_sglang(section: SglangSection | None) -> None:
    """Refuse an interpreter that cannot be started or has no SGLang. A broken SGLang is told by its server's start.

    Args:
        section: ``[rollout.sglang]``; nothing is asked without it, or when the engines run already.

    Raises:
        LoraError: with the option that names the interpreter.
    """
    if section is None or section.urls:
        return
    if section.in_process:
        if not probe.has_sglang():
            raise LoraError(
                "rollout.sglang.in_process",
                reason=f"this interpreter ({sys.executable}) has no SGLang",
                cure="remove it and set rollout.sglang.python to an interpreter that has SGLang",
            )
        return
    interpreter = str(section.python or sys.executable)
    subject, cure = f"rollout.sglang.python = {interpreter!r}", "install SGLang into it, or name one that has SGLang"
    try:
        looked = subprocess.run(
            [interpreter, probe.__file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except OSError as error:
        raise LoraError(subject, reason=f"cannot be started ({error.strerror})", cure=cure) from None
    except subprocess.TimeoutExpired:
        reason = f"did not say within {_SECONDS:g} s whether it has SGLang"
        raise LoraError(subject, reason=reason, cure=cure) from None
    if looked.returncode == probe.ABSENT:
        raise LoraError(subject, reason=f"{interpreter} has no SGLang", cure=cure)
    if looked.returncode:
        last = (looked.stderr.strip() or "nothing was printed").splitlines()[-1]
        raise LoraError(subject, reason=f"is no Python interpreter that works ({last})", cure=cure)
