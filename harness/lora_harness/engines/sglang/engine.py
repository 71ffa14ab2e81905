"""SGLang behind the harness's rollout protocol: one or several engines, shared by all ranks of the trainer."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lora_harness.engines.base import Completion, EngineCapabilities, GenerationRequest
from lora_harness.engines.requests import check_requests
from lora_harness.engines.sglang.client import SglangClient, SglangCompletion, SglangRequest
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.serving import PolicySync, Serving
from lora_harness.ranks import is_alone, on_first_rank
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor

_BASE = Serving(version=0)


class SglangEngine:
    """A `RolloutEngine` over a group of SGLang engines.

    Rank 0 brings versions of the policy to the engines; every rank sends its own requests to them. The requests of one
    call are dealt out over the engines, and each engine gets its share in one message, so that it can batch all of it.

    Args:
        group: the engines, on rank 0 with the means to restart them.
        sync: how the policy reaches them; on rank 0 only, and None there too when it never does.
        capabilities: what the engines serve.
        vocab_size: tokens that the model has.
        context: positions that it has.
    """

    def __init__(
        self,
        group: EngineGroup,
        sync: PolicySync | None,
        *,
        capabilities: EngineCapabilities,
        vocab_size: int,
        context: int,
    ) -> None:
        self.capabilities = capabilities
        self._group = group
        self._sync = sync
        self._vocab_size = vocab_size
        self._context = context
        self._stamp = _BASE
        self._open = True
        run = uuid.uuid4().hex[:12]
        self._rids = (f"{run}-{number}" for number in itertools.count())

    @property
    def adapter_version(self) -> int:
        """See `RolloutEngine.adapter_version`."""
        return self._stamp.version

    def publish(self, version: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """See `RolloutEngine.publish`. Collective over all ranks; rank 0 sends."""
        self._refuse_closed()

        def send() -> tuple[int, Serving]:
            assert self._sync is not None, "rank 0 has the means to publish"
            sent = self._sync.publish(version, tensors, config)
            with self._sync.serving() as stamp:
                return sent, stamp

        sent, self._stamp = on_first_rank(send)
        return sent

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See `RolloutEngine.generate`. An engine of this run's own that dies is restarted once, if no rank but this
        one uses it."""
        self._refuse_closed()
        check_requests(requests, vocab_size=self._vocab_size, context=self._context)
        with self._serving() as stamp:
            asked = [
                SglangRequest(
                    rid=next(self._rids),
                    prompt_ids=one.prompt_ids,
                    sampling=one.sampling,
                    seed=one.seed,
                    adapter=stamp.adapter,
                )
                for one in requests
            ]
            return [_completion(one, stamp) for one in self._answers(asked)]

    def close(self) -> None:
        """See `RolloutEngine.close`. Stops the engines that this run started. Safe to call twice."""
        if self._open and self._sync is not None:
            self._sync.close()
        self._open = False
        for client in self._group.clients:
            client.close()

    @contextmanager
    def _serving(self) -> Iterator[Serving]:
        if self._sync is None:
            yield self._stamp
        else:
            with self._sync.serving() as stamp:
                yield stamp

    def _answers(self, asked: list[SglangRequest]) -> list[SglangCompletion]:
        engines = len(self._group.clients)
        shares = [asked[index::engines] for index in range(engines)]
        with ThreadPoolExecutor(engines, thread_name_prefix="rollout") as pool:
            running = [pool.submit(self._share, index, share) for index, share in enumerate(shares)]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
                for failed in running:
                    if failed.done():
                        failed.result()
            except BaseException:
                # Also on Ctrl-C: the pool waits for its threads, and they for the engines.
                self._abort(shares, running)
                raise
        answers: list[Any] = [None] * len(asked)
        for index, one in enumerate(running):
            answers[index::engines] = one.result()
        return answers

    def _share(self, index: int, share: list[SglangRequest]) -> list[SglangCompletion]:
        client = self._group.clients[index]
        try:
            return client.generate(share)
        except LoraError as error:
            if self._sync is None or not self._group.ours or not is_alone() or client.healthy():
                raise
            self._group.say(f"engine {client.name} failed while it drew completions: {error}")
            self._sync.recover(index)
            return self._group.clients[index].generate(share)

    def _abort(self, shares: list[list[SglangRequest]], running: list[Future[list[SglangCompletion]]]) -> None:
        for client, share, one in zip(self._group.clients, shares, running, strict=True):
            if not one.done():
                with suppress(LoraError):
                    _abort_all(client, share)

    def _refuse_closed(self) -> None:
        if not self._open:
            raise LoraError("SGLang engine", reason="it was closed", cure="open a new engine")


def _abort_all(client: SglangClient, share: list[SglangRequest]) -> None:
    for request in share:
        client.abort(request.rid)


def _completion(drawn: SglangCompletion, stamp: Serving) -> Completion:
    stamp.check(drawn)
    if drawn.finish_reason == "abort":
        raise LoraError(
            f"completion of policy version {stamp.version}",
            reason=f"was aborted on the engine after {len(drawn.token_ids)} tokens",
            cure="let no one else abort this run's requests",
        )
    return Completion(
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs,
        finish_reason=drawn.finish_reason,
        adapter_version=stamp.version,
    )
