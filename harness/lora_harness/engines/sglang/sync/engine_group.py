"""The engines of a run, asked side by side; one that fails is an answer, not an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lora_harness.engines.sglang.client import SglangClient
from lora_plugins_sdk.errors import LoraError

T = TypeVar("T")
Restart = Callable[[int], SglangClient]


class EngineGroup:
    """Clients by number; a restart puts another client in a number's place.

    Args:
        clients: one for each engine, 1 or more.
        restart: starts engine `index` anew and returns its client once it is healthy; raises `LoraError`. None when the
            engines are not ours to start.
        say: tells the user what happened.
    """

    def __init__(
        self,
        clients: Sequence[SglangClient],
        *,
        restart: Restart | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert clients, "a group has an engine"
        self._clients = list(clients)
        self._restart = restart
        self.say = say

    @property
    def clients(self) -> tuple[SglangClient, ...]:
        """The engines as they are now."""
        return tuple(self._clients)

    @property
    def ours(self) -> bool:
        """Whether this run started the engines, and can again."""
        return self._restart is not None

    def each(self, work: Callable[[SglangClient], T], indices: Iterable[int] | None = None) -> dict[int, T | LoraError]:
        """Do the same on several engines at once.

        Args:
            work: what to do; the `LoraError` it raises is that engine's answer.
            indices: which engines; all without it.
        """
        chosen = list(range(len(self._clients)) if indices is None else indices)
        if not chosen:
            return {}

        def one(index: int) -> T | LoraError:
            try:
                return work(self._clients[index])
            except LoraError as error:
                return error

        with ThreadPoolExecutor(len(chosen), thread_name_prefix="sync") as pool:
            return dict(zip(chosen, pool.map(one, chosen), strict=True))

    def restart(self, index: int) -> None:
        """Start one engine anew; the rest is not touched.

        Raises:
            LoraError: it cannot be started, or is not ours to start.
        """
        name = self._clients[index].name
        if self._restart is None:
            raise LoraError(
                f"engine {name}",
                reason="failed, and this run did not start it",
                cure="start it again and resume the run",
            )
        self._clients[index].close()
        self._clients[index] = self._restart(index)
        self.say(f"engine {name} was restarted")


def failures(answers: dict[int, T | LoraError]) -> dict[int, LoraError]:
    """The engines that failed."""
    return {index: one for index, one in answers.items() if isinstance(one, LoraError)}
