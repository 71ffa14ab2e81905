"""Completions of a set of prompts, shared out over all ranks, scored, and known to every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lora_harness.batch import DrawnSequence
from lora_harness.engines.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from lora_harness.prompts import PromptEncoder
from lora_harness.ranks import from_every_rank, on_every_rank
from lora_harness.tasks import Example, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One scored completion.

    Args:
        prompt_ids: the prompt as the engine saw it.
        completion: what the engine drew.
        text: the completion's text, special tokens left out.
        reward: its score.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    reward: float

    def drawn(self) -> DrawnSequence:
        """What the trainer needs of it."""
        return DrawnSequence(self.prompt_ids, self.completion.token_ids, self.completion.logprobs)


def request_seed(seed: int, occasion: str, prompt: int, sample: int) -> int:
    """Seed of one request: it depends on the run's seed and the request's place, not on who serves it."""
    digest = hashlib.sha256(f"{seed}/{occasion}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


class RolloutCollector:
    """Draws and scores completions with every rank's engine.

    Args:
        engine: this rank's engine; all ranks' engines hold the same adapter.
        task: scores the completions.
        encoder: turns examples into token ids and completions into text.
        seed: the run's seed.
    """

    def __init__(self, engine: RolloutEngine, task: Task, encoder: PromptEncoder, *, seed: int) -> None:
        self._engine = engine
        self._task = task
        self._encoder = encoder
        self._seed = seed

    def collect(
        self, examples: Sequence[Example], *, samples: int, sampling: SamplingParams, occasion: str
    ) -> list[list[Rollout]]:
        """Complete every example `samples` times. Collective over all ranks; all get the same answer.

        Args:
            examples: what to complete.
            samples: completions of each.
            sampling: how to draw; stop tokens are the encoder's.
            occasion: keeps the random numbers of different calls apart, for example "train/3".

        Returns:
            One list per example.

        Raises:
            LoraError: on every rank, when any rank's engine or scorer failed.
        """
        places = [(prompt, sample) for prompt in range(len(examples)) for sample in range(samples)]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = places[rank::ranks]
        # Drawing may take all ranks, so that each says first whether it has something to ask.
        requests = on_every_rank(lambda: self._requests(examples, mine, sampling, occasion))
        shares = from_every_rank(lambda: self._serve(examples, mine, requests))
        ordered: list[Any] = [None] * len(places)
        for index, share in enumerate(shares):
            ordered[index::ranks] = share
        return [ordered[start : start + samples] for start in range(0, len(ordered), samples)]

    def _requests(
        self, examples: Sequence[Example], places: list[tuple[int, int]], sampling: SamplingParams, occasion: str
    ) -> list[GenerationRequest]:
        prompts = {prompt: self._encoder.encode(examples[prompt]) for prompt in {place[0] for place in places}}
        return [
            GenerationRequest(
                prompt_ids=prompts[prompt],
                sampling=sampling,
                seed=request_seed(self._seed, occasion, prompt, sample),
            )
            for prompt, sample in places
        ]

    def _serve(
        self, examples: Sequence[Example], places: list[tuple[int, int]], requests: list[GenerationRequest]
    ) -> list[Rollout]:
        rollouts = []
        for (prompt, _), request, completion in zip(places, requests, self._engine.generate(requests), strict=True):
            text = self._encoder.decode(completion.token_ids)
            rollouts.append(
                Rollout(
                    prompt_ids=request.prompt_ids,
                    completion=completion,
                    text=text,
                    reward=self._task.score(examples[prompt], text),
                )
            )
        return rollouts


def mean_reward(groups: Sequence[Sequence[Rollout]]) -> float:
    """Mean over all completions."""
    rewards = [one.reward for group in groups for one in group]
    return sum(rewards) / len(rewards)
