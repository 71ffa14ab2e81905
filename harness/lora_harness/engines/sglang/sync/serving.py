"""What the rest of the harness asks of either way in which the policy reaches the engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lora_harness.engines.sglang.client import SglangCompletion
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What stamps a call's requests.

    Args:
        version: the policy's version; 0 is the base.
        adapter: adapter that every request must name; None in merge mode and for the base.
        weight_version: what the engine must say of its weights in every answer; None where it says nothing of ours.
    """

    version: int
    adapter: str | None = None
    weight_version: str | None = None

    def check(self, completion: SglangCompletion) -> None:
        """Refuse an answer that other weights gave.

        Raises:
            LoraError: the engine's stamp is not the expected one.
        """
        if self.weight_version is not None and completion.weight_version != self.weight_version:
            raise LoraError(
                f"completion of policy version {self.version}",
                reason=f"the engine answered with weights {completion.weight_version!r}, not {self.weight_version!r}",
                cure="let no one else update the engine's weights",
            )


class PolicySync(Protocol):
    """Brings versions of the policy to all engines: every one has a version before any request asks for it."""

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """Make an adapter the one that new requests get, on all engines or on none.

        An engine that fails is restarted when it is ours, and gets the base and the adapter again.

        Args:
            version: stamp, larger than every one before.
            tensors: PEFT tensor name -> full factor.
            config: `adapter_config.json`.

        Returns:
            Bytes of tensor data sent, over all engines.

        Raises:
            LoraError: the adapter cannot be served (nothing was sent), or an engine could not take it; requests get
                the version before then.
        """
        ...

    def serving(self) -> AbstractContextManager[Serving]:
        """The stamp for requests that start now; its version stays on the engines until the block ends."""
        ...

    def recover(self, index: int) -> None:
        """Restart engine `index`, which failed, and give it what it served.

        A request may ask for it within `serving`, also while a publish waits for that request to end; the publish's
        patience goes on meanwhile.

        Raises:
            LoraError: it cannot be restarted, or does not take what it had.
        """
        ...

    def close(self) -> None:
        """Leave nothing of this run on engines that outlive it, nor on shared storage. No request may follow."""
        ...
