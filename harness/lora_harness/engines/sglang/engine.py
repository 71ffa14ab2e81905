"""SGLang behind the harness's rollout protocol: one or several engines, shared by all ranks of the trainer."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lora_harness.engines.base import Completion, EngineCapabilities, GenerationRequest
from lora_harness.engines.requests import check_requests
from lora_harness.engines.sglang.client import SglangCompletion, SglangRequest
from lora_harness.engines.sglang.drawing import Drawing
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.serving import PolicySync, Serving
from lora_harness.ranks import from_every_rank, on_every_rank, on_first_rank
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from torch import Tensor

# Of one engine while the same completions are drawn: what ends it again and again is the completions.
MOST_RESTARTS = 2
_BASE = Serving(version=0)


class SglangEngine:
    """A `RolloutEngine` over a group of SGLang engines.

    Rank 0 brings versions of the policy to the engines and restarts those that die; every rank sends its own requests.

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
        """See `RolloutEngine.generate`. Collective over all ranks.

        An engine of this run's own that dies on any rank's requests is restarted, gets its policy again and is asked
        again for what it had not answered, with the same seeds.
        """
        restarts: Counter[int] = Counter()
        with self._serving() as stamp:
            drawing = on_every_rank(lambda: self._drawing(requests, stamp))
            while dead := _any_rank_saw(from_every_rank(drawing.attempt)):
                on_first_rank(lambda dead=dead: self._bring_back(dead, restarts))
            return [_completion(one, stamp) for one in drawing.completions()]

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

    def _drawing(self, requests: Sequence[GenerationRequest], stamp: Serving) -> Drawing:
        self._refuse_closed()
        check_requests(requests, vocab_size=self._vocab_size, context=self._context)
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
        return Drawing(self._group, asked)

    def _bring_back(self, dead: Mapping[int, LoraError], restarts: Counter[int]) -> None:
        """On rank 0: restart engines that died while completions were drawn.

        Args:
            dead: what a rank met, by engine.
            restarts: of each engine in this call, counted here.
        """
        for index, met in dead.items():
            client = self._group.clients[index]
            # Other ranks cannot read the log.
            cause = client.death() or met
            if not self._group.ours:
                raise LoraError(
                    f"engine {client.name}",
                    reason=f"failed while it drew completions, and this run did not start it ({cause})",
                    cure="start it again and resume the run",
                )
            if restarts[index] == MOST_RESTARTS:
                raise LoraError(
                    f"engine {client.name}",
                    reason=f"failed again after {MOST_RESTARTS} restarts while it drew the same completions: {cause}",
                    cure="correct what its log names, or ask less of it (rollout.max_batch_size, "
                    "rollout.max_new_tokens, rollout.sglang.arguments.mem_fraction_static), and resume the run",
                )
            restarts[index] += 1
            self._group.say(f"engine {client.name} failed while it drew completions: {cause}")
            if self._sync is None:
                self._group.restart(index)
            else:
                self._sync.recover(index)

    def _refuse_closed(self) -> None:
        if not self._open:
            raise LoraError("SGLang engine", reason="it was closed", cure="open a new engine")


def _any_rank_saw(ranks: Sequence[Mapping[int, LoraError]]) -> dict[int, LoraError]:
    """Engines that died, by number, and what the first rank that noticed met."""
    return {index: error for dead in reversed(ranks) for index, error in dead.items()}


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
