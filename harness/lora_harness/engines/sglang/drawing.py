"""The completions of one call: dealt out over the engines, asked again from engines that died meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from lora_harness.engines.sglang.client import SglangClient, SglangCompletion, SglangRequest
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_plugins_sdk.errors import LoraError

Answer = list[SglangCompletion] | LoraError


class Drawing:
    """This rank's requests of one call. Each engine gets its share in one message, so that it can batch all of it.

    Args:
        group: the engines.
        requests: any number, none included.
    """

    def __init__(self, group: EngineGroup, requests: Sequence[SglangRequest]) -> None:
        self._group = group
        self._engines = len(group.clients)
        self._shares = [requests[index :: self._engines] for index in range(self._engines)]
        self._answers: dict[int, list[SglangCompletion]] = {}

    def attempt(self) -> dict[int, LoraError]:
        """Ask for what is not answered yet; returns the engines that died on it, by number.

        Raises:
            LoraError: an engine that lives refused; what the others still draw is aborted.
        """
        left = [index for index, share in enumerate(self._shares) if share and index not in self._answers]
        if not left:
            return {}
        with ThreadPoolExecutor(len(left), thread_name_prefix="rollout") as pool:
            running = {index: pool.submit(self._ask, index) for index in left}
            try:
                wait(running.values(), return_when=FIRST_EXCEPTION)
                for failed in running.values():
                    if failed.done():
                        failed.result()
            except BaseException:
                # Also on Ctrl-C: the pool waits for its threads, and they for the engines.
                self._abort(running)
                raise
        dead: dict[int, LoraError] = {}
        for index, one in running.items():
            answer = one.result()
            if isinstance(answer, LoraError):
                dead[index] = answer
            else:
                self._answers[index] = answer
        return dead

    def completions(self) -> list[SglangCompletion]:
        """All of them, in the order of the requests; no engine may be left that died."""
        places = [index % self._engines for index in range(sum(map(len, self._shares)))]
        answers = {index: iter(answer) for index, answer in self._answers.items()}
        return [next(answers[index]) for index in places]

    def _ask(self, index: int) -> Answer:
        client = self._group.clients[index]
        try:
            return client.generate(self._shares[index])
        except LoraError as error:
            if client.healthy():
                raise
            return error

    def _abort(self, running: dict[int, Future[Answer]]) -> None:
        for index, one in running.items():
            if not one.done():
                with suppress(LoraError):
                    _abort_all(self._group.clients[index], self._shares[index])


def _abort_all(client: SglangClient, share: Sequence[SglangRequest]) -> None:
    for request in share:
        client.abort(request.rid)
