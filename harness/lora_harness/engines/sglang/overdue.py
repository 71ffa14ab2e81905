"""Calls that an engine does not answer in time, the same through every client."""

from __future__ import annotations

from collections.abc import Sequence

from lora_harness.engines.sglang.client import SglangClient, SglangRequest
from lora_plugins_sdk.errors import LoraError


class TooLong(LoraError):
    """A call was not answered in time.

    Args:
        engine: the engine's name.
        what: the call.
        timeout: seconds.
    """

    def __init__(self, engine: str, what: str, timeout: float) -> None:
        super().__init__(
            f"engine {engine}",
            reason=f"{what} was not answered within {timeout:g} s",
            cure="raise rollout.sglang.timeout",
        )


def abort_overdue(client: SglangClient, requests: Sequence[SglangRequest], timeout: float) -> LoraError:
    """Abort completions that took longer than `timeout` seconds; returns the error that says so.

    An engine that does not take one abort is not asked for the others: it does not answer at all.
    """
    outcome = "were aborted"
    try:
        for one in requests:
            client.abort(one.rid)
    except LoraError as error:
        outcome = f"could not be aborted ({error.diagnostics[0].reason})"
    return LoraError(
        f"engine {client.name}",
        reason=f"{len(requests)} completions were not there after {timeout:g} s and {outcome}",
        cure="raise rollout.sglang.timeout, or draw fewer or shorter completions in a step",
    )
